"""Adapters in a row, with their rates and ranks as columns, so that parts of it are described without a walk.

Packers ask about ever longer parts of the same queue: an answer must not take time for each adapter.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from loraplex.planner.demand import AdapterDemand


class Columns(NamedTuple):
    """Numbers by adapter, in double precision."""

    rates_rps: memoryview
    ranks: memoryview


def columns_of(adapters: Sequence[AdapterDemand]) -> Columns:
    if isinstance(adapters, Queued):
        return adapters.columns
    rates, ranks = (array("d", [getattr(each, name) for each in adapters]) for name in ("rate_rps", "rank"))
    return Columns(memoryview(rates), memoryview(ranks))


class Queued(Sequence[AdapterDemand]):
    """Adapters in their order. A slice shares the columns, a sum joins them."""

    __slots__ = ("_adapters", "columns")

    def __init__(self, adapters: Iterable[AdapterDemand], columns: Columns | None = None) -> None:
        """`columns`: those of these adapters, if they are known."""
        self._adapters = tuple(adapters)
        self.columns = columns_of(self._adapters) if columns is None else columns

    @property
    def max_rank(self) -> int:
        return int(max(self.columns.ranks, default=0))

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[AdapterDemand]:
        return iter(self._adapters)

    @overload
    def __getitem__(self, place: int) -> AdapterDemand: ...

    @overload
    def __getitem__(self, place: slice) -> Queued: ...

    def __getitem__(self, place: int | slice) -> AdapterDemand | Queued:
        if isinstance(place, slice):
            return Queued(self._adapters[place], Columns(*(each[place] for each in self.columns)))
        return self._adapters[place]

    def __add__(self, other: Queued) -> Queued:
        both = zip(self.columns, other.columns, strict=True)
        joined = [memoryview(array("d", one.tobytes() + two.tobytes())) for one, two in both]
        return Queued(self._adapters + other._adapters, Columns(*joined))
