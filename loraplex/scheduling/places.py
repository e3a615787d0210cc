"""Allocation of adapters in a stretch of memory with a fixed top and a border below that moves.

    ... | gap | adapter | hole | adapter | adapter | hole | adapter |
      begin                                                        end

Sizes are in units of the caller's choice. An adapter is one contiguous piece. It goes to the upper end of the
smallest hole that fits it, so that the rest of the hole lies towards the border. Adapters can be shifted
upwards to widen the gap at the border; those being loaded are fixed and stay where they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shift:
    """A move of an adapter to a place further up; source and target may overlap."""

    name: str
    source: int
    target: int
    size: int


class Places:
    """Records which adapter lies where; copies nothing itself."""

    def __init__(self, end: int) -> None:
        self._begin = self._end = end
        self._spans: list[tuple[int, int, str]] = []  # start, size, name; in order of start
        self._span_of: dict[str, tuple[int, int]] = {}
        self._fixed: set[str] = set()
        self._num_used = 0

    @property
    def begin(self) -> int:
        return self._begin

    @property
    def num_free(self) -> int:
        """Units that are free, in all holes together."""
        return self._end - self._begin - self._num_used

    @property
    def gap(self) -> int:
        """Free units right above the border."""
        return (self._spans[0][0] if self._spans else self._end) - self._begin

    def span_of(self, name: str) -> tuple[int, int]:
        """Return the start and size of an adapter."""
        return self._span_of[name]

    def put(self, name: str, size: int) -> bool:
        """Place an adapter in the smallest hole that fits it, and fix it there. Return False if there is
        none."""
        if size > self.num_free:
            return False
        if self.gap == self.num_free:  # the gap is the only hole
            self._take_hole(name, self._begin, self.gap, size)
            return True
        fitting = [(hole_size, start) for start, hole_size in self._holes() if hole_size >= size]
        if not fitting:
            return False
        hole_size, start = min(fitting)
        self._take_hole(name, start, hole_size, size)
        return True

    def largest_hole(self, without: Collection[str]) -> int:
        """Return the units of the largest piece that would be free without these adapters."""
        largest, cursor = 0, self._begin
        for start, size, name in self._spans:
            if name not in without:
                largest, cursor = max(largest, start - cursor), start + size
        return max(largest, self._end - cursor)

    def unfix(self, name: str) -> None:
        """Allow an adapter to be shifted from now on."""
        self._fixed.discard(name)

    def remove(self, name: str) -> None:
        self._num_used -= self._delete(name)
        self._fixed.discard(name)

    def extend(self, size: int) -> None:
        """Move the border down."""
        assert 0 <= size <= self._begin
        self._begin -= size

    def retract(self, size: int) -> None:
        """Move the border up, through the gap."""
        assert 0 <= size <= self.gap
        self._begin += size

    def lift(self, gap: int) -> list[Shift]:
        """Shift the lowest adapters into holes further up that fit them, until the gap has this size or no
        shift is possible. Return the shifts in the order to copy them."""
        shifts: list[Shift] = []
        while self.gap < gap and (shift := self._lift_lowest()) is not None:
            shifts.append(shift)
        return shifts

    def push_together(self) -> list[Shift]:
        """Close all holes towards the top except those right above fixed adapters. Return the shifts in the
        order to copy them."""
        shifts, top = [], self._end
        for start, size, name in reversed(self._spans.copy()):
            if name not in self._fixed and start + size < top:
                shifts.append(self._shift(name, top - size))
                start = top - size
            top = start
        return shifts

    def check_integrity(self, sizes: dict[str, int]) -> None:
        """Assert that exactly these adapters have places of these sizes, and that no two overlap."""
        assert {name: size for name, (_, size) in self._span_of.items()} == sizes
        assert self._fixed <= sizes.keys()
        assert self._num_used == sum(sizes.values())
        cursor = self._begin
        for start, size, name in self._spans:
            assert start >= cursor, f"{name} overlaps what lies below it"
            assert self._span_of[name] == (start, size)
            cursor = start + size
        assert cursor <= self._end
        assert len(self._spans) == len(self._span_of)

    def _holes(self) -> Iterable[tuple[int, int]]:
        """Yield (start, size) of each hole, from the border upwards."""
        cursor = self._begin
        for start, size, _ in self._spans:
            if start > cursor:
                yield cursor, start - cursor
            cursor = start + size
        if self._end > cursor:
            yield cursor, self._end - cursor

    def _lift_lowest(self) -> Shift | None:
        """Shift the lowest adapter into the smallest hole above it that fits it, if there is one."""
        if not self._spans or self._spans[0][2] in self._fixed:
            return None
        source, size, name = self._spans[0]
        fitting = [(hole, start) for start, hole in self._holes() if start > source and hole >= size]
        if not fitting:
            return None
        hole, start = min(fitting)
        return self._shift(name, start + hole - size)

    def _shift(self, name: str, target: int) -> Shift:
        source, size = self._span_of[name]
        self._delete(name)
        self._insert(name, target, size)
        return Shift(name, source, target, size)

    def _take_hole(self, name: str, start: int, hole_size: int, size: int) -> None:
        self._insert(name, start + hole_size - size, size)
        self._fixed.add(name)
        self._num_used += size

    def _insert(self, name: str, start: int, size: int) -> None:
        self._span_of[name] = (start, size)
        insort(self._spans, (start, size, name))

    def _delete(self, name: str) -> int:
        start, size = self._span_of.pop(name)
        del self._spans[bisect_left(self._spans, (start, size, name))]
        return size
