"""The result of a placement: the replicas that serve each adapter, and each one's share of its requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.core.errors import UserError
from loraplex.core.words import plural
from loraplex.fleet.adapter_sizes import AdapterSizes

_SHARE_TOLERANCE: Final = 1e-9


class Entry(NamedTuple):
    """An adapter's part of a plan: its replicas, and the share of its requests that each of them gets."""

    replicas: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def of_weights(cls, weights: Mapping[int, float]) -> Entry:
        """Return the entry for weights by replica, of which there is at least one; shares are in proportion
        to them. Raises UserError if their sum is not positive and finite."""
        if len(weights) == 1:
            return cls(tuple(weights), (1.0,))
        placed = tuple(sorted(weights))
        total = sum(weights.values())
        if placed and not 0 < total < math.inf:
            raise UserError(
                f"the weights of replicas {', '.join(map(str, placed))} sum to {total:g}; an adapter needs a "
                "replica with a weight above 0, and no weight without end"
            )
        return cls(placed, tuple(weights[replica] / total for replica in placed))

    def limited_to(self, replicas: Set[int]) -> Entry | None:
        """Return the entry limited to these replicas, which also take the shares of the others in proportion;
        None if no replica is left."""
        if replicas >= set(self.replicas):
            return self
        left = {each: share for each, share in zip(*self, strict=True) if each in replicas}
        return Entry.of_weights(left) if left else None

    def renumbered(self, numbers: Mapping[int, int] | Sequence[int]) -> Entry:
        """Return the entry with `numbers[replica]` for each replica; these must be ascending too."""
        return Entry(tuple([numbers[replica] for replica in self.replicas]), self.shares)


class Copies(NamedTuple):
    """All copies of a plan as columns, sorted by adapter and then by replica."""

    adapters: IntArray
    replicas: IntArray
    shares: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The replicas that serve each adapter, and the share of its requests that each of them gets."""

    replicas: tuple[tuple[int, ...], ...]
    """The replicas of each adapter: at least one, distinct and ascending."""
    shares: tuple[tuple[float, ...], ...]
    """The shares of each adapter, parallel to `replicas`: each above zero, with a sum of one."""

    @classmethod
    def with_equal_shares(cls, replicas: Sequence[Sequence[int]]) -> Plan:
        """Return the plan in which the replicas of an adapter get the same share each."""
        kept = tuple(tuple(sorted(each)) for each in replicas)
        equal = {num: (1 / num,) * num for num in {len(each) for each in kept} if num}
        return cls(replicas=kept, shares=tuple(equal.get(len(each), ()) for each in kept))

    @classmethod
    def of_homes(cls, homes: IntArray) -> Plan:
        """Return the plan that places each adapter on one replica, `homes[adapter]`."""
        return cls(replicas=tuple((home,) for home in homes.tolist()), shares=((1.0,),) * len(homes))

    @classmethod
    def of_weights(cls, weights: Sequence[Mapping[int, float]]) -> Plan:
        """Return the plan for weights by replica, for each adapter; shares are in proportion to them."""
        return cls.of_entries([Entry.of_weights(each) for each in weights])

    @classmethod
    def of_entries(cls, entries: Sequence[Entry]) -> Plan:
        """Return the plan with these entries, one for each adapter."""
        return cls(
            replicas=tuple([each.replicas for each in entries]),
            shares=tuple([each.shares for each in entries]),
        )

    def entries(self) -> list[Entry]:
        """Return the entries of all adapters."""
        return list(map(Entry, self.replicas, self.shares))

    def with_entry(self, adapter: int, entry: Entry) -> Plan:
        """Return the plan with another entry for one adapter."""
        replicas, shares = list(self.replicas), list(self.shares)
        replicas[adapter], shares[adapter] = entry
        return Plan(replicas=tuple(replicas), shares=tuple(shares))

    @property
    def num_copies(self) -> int:
        """The number of copies of adapters in the fleet."""
        return sum(map(len, self.replicas))

    def check(self, num_adapters: int, num_replicas: int) -> None:
        """Raise a UserError that says what is wrong with the plan for a fleet of this size."""
        if len(self.replicas) < num_adapters:
            raise UserError(
                f"adapter {len(self.replicas)} has no replica: the plan places {len(self.replicas)} of "
                f"{num_adapters} adapters"
            )
        self.check_known(num_adapters, num_replicas)

    def check_known(self, num_adapters: int, num_replicas: int) -> None:
        """Check a plan that may lack the latest adapters; otherwise like `check`."""
        if len(self.replicas) > num_adapters:
            raise UserError(
                f"the plan names adapter {len(self.replicas) - 1}, but the fleet has {num_adapters} "
                f"{plural('adapter', num_adapters)}"
            )
        self._check_shapes()
        try:
            copies = self.copies()
        except OverflowError:
            raise UserError(
                f"the plan names a replica with a number beyond all that there can be; the fleet has "
                f"{num_replicas} {plural('replica', num_replicas)}, numbered from 0"
            ) from None
        unknown = np.flatnonzero((copies.replicas < 0) | (copies.replicas >= num_replicas))
        if unknown.size:
            adapter, replica = copies.adapters[unknown[0]], copies.replicas[unknown[0]]
            raise UserError(
                f"the plan places adapter {adapter} on replica {replica}, but the fleet has {num_replicas} "
                f"{plural('replica', num_replicas)}, numbered from 0"
            )
        same_adapter = copies.adapters[1:] == copies.adapters[:-1]
        unordered = np.flatnonzero(same_adapter & (copies.replicas[1:] <= copies.replicas[:-1]))
        if unordered.size:
            adapter = int(copies.adapters[unordered[0]])
            raise UserError(
                f"the replicas of adapter {adapter} must be distinct and ascending; they are "
                f"{self.replicas[adapter]}"
            )
        self._check_shares(copies)

    def _check_shapes(self) -> None:
        if len(self.shares) != len(self.replicas):
            raise UserError(
                f"the plan has replicas for {len(self.replicas)} adapters and shares for {len(self.shares)}"
            )
        for adapter, (replicas, shares) in enumerate(zip(self.replicas, self.shares, strict=True)):
            if not replicas:
                raise UserError(f"adapter {adapter} has no replica")
            if len(replicas) != len(shares):
                raise UserError(
                    f"adapter {adapter} has {len(replicas)} replicas and {len(shares)} shares; each replica "
                    "needs one"
                )
        kinds = set(map(type, chain.from_iterable(self.replicas)))
        if not all(issubclass(kind, int | np.integer) for kind in kinds):
            adapter, replica = next(
                (adapter, replica)
                for adapter, replicas in enumerate(self.replicas)
                for replica in replicas
                if not isinstance(replica, int | np.integer)
            )
            raise UserError(
                f"the plan places adapter {adapter} on replica {replica!r}; replicas have whole numbers"
            )

    def _check_shares(self, copies: Copies) -> None:
        # Written so that NaN is refused as well.
        wrong = np.flatnonzero(~(copies.shares > 0))
        if wrong.size:
            raise UserError(
                f"adapter {copies.adapters[wrong[0]]} has a share of {copies.shares[wrong[0]]:g} on replica "
                f"{copies.replicas[wrong[0]]}; shares must be above 0"
            )
        sums = np.bincount(copies.adapters, weights=copies.shares, minlength=len(self.replicas))
        wrong = np.flatnonzero(~(np.abs(sums - 1) <= _SHARE_TOLERANCE))
        if wrong.size:
            raise UserError(f"the shares of adapter {wrong[0]} sum to {sums[wrong[0]]:g}, not to 1")

    def copies(self) -> Copies:
        """Return all copies as columns."""
        num_copies = self.num_copies
        counts = np.fromiter(map(len, self.replicas), np.int64, len(self.replicas))
        return Copies(
            adapters=np.repeat(np.arange(len(self.replicas), dtype=np.int64), counts),
            replicas=np.fromiter(chain.from_iterable(self.replicas), np.int64, num_copies),
            shares=np.fromiter(chain.from_iterable(self.shares), np.float64, num_copies),
        )

    def bytes_by_replica(self, table: AdapterSizes, num_replicas: int) -> IntArray:
        """Return the bytes that the adapters of each replica take."""
        copies = self.copies()
        taken_bytes = np.zeros(num_replicas, dtype=np.int64)
        np.add.at(taken_bytes, copies.replicas, table.num_bytes[copies.adapters])
        return taken_bytes
