"""The adapters of a fleet, by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loraplex.core.arrays import IntArray
from loraplex.core.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterSizes:
    """The ranks and sizes of a fleet's adapters 0 to A-1. Adapters are appended, so an adapter keeps its
    number."""

    ranks: IntArray
    """The largest rank of any module of each adapter."""
    num_bytes: IntArray
    """Bytes of one copy of each adapter in memory, on the host or on a device."""

    def __post_init__(self) -> None:
        if self.ranks.shape != self.num_bytes.shape or self.ranks.ndim != 1:
            raise UserError(
                f"each adapter needs a rank and a size; there are {self.ranks.size} ranks and "
                f"{self.num_bytes.size} sizes"
            )
        for name, values in (("rank", self.ranks), ("size in bytes", self.num_bytes)):
            wrong = np.flatnonzero(values < 1)
            if wrong.size:
                raise UserError(
                    f"adapter {wrong[0]} has {values[wrong[0]]} as its {name}; it must be 1 at least"
                )

    @classmethod
    def of(cls, *, ranks: Sequence[int], num_bytes: Sequence[int]) -> AdapterSizes:
        """Return the adapters of these columns."""
        return cls(ranks=np.array(ranks, dtype=np.int64), num_bytes=np.array(num_bytes, dtype=np.int64))

    def at(self, adapters: IntArray) -> AdapterSizes:
        """Return these adapters alone, renumbered by their positions in `adapters`."""
        return AdapterSizes(ranks=self.ranks[adapters], num_bytes=self.num_bytes[adapters])

    def followed_by(self, added: AdapterSizes) -> AdapterSizes:
        """Return the adapters with more of them at the end."""
        return AdapterSizes(
            ranks=np.concatenate([self.ranks, added.ranks]),
            num_bytes=np.concatenate([self.num_bytes, added.num_bytes]),
        )

    def __len__(self) -> int:
        return len(self.ranks)
