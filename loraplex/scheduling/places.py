"""Allocation of adapters in a stretch of memory with a border below that moves.

    ... | gap | adapter | hole | adapter | adapter | hole | adapter |
      begin                                                        end

Sizes are in units of the caller's choice. An adapter is one contiguous piece. It goes to the upper end of the
smallest hole that fits it, so that the rest of the hole lies towards the border. Adapters can be shifted
upwards to widen the gap at the border, and downwards where the end is lowered, for other uses of the memory
above it; those being loaded are fixed and stay where they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shift:
    """A move of an adapter to another place; source and target may overlap."""

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
    def end(self) -> int:
        return self._end

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

    def num_units_above(self, limit: int) -> int:
        """Return the units of the adapters that end above this limit."""
        return sum(size for start, size, _ in self._spans if start + size > limit)

    def lower_end(self, size: int) -> list[Shift] | None:
        """Move the end down. Return the shifts of adapters to places below it, in the order to copy them;
        None if there are no such places, and then nothing was changed."""
        if not self.can_lower_end(size):
            return None
        self._end -= size
        shifts = self._move_into_holes()
        return self._pack_below_end() if shifts is None else shifts

    def can_lower_end(self, size: int, *, extended: int = 0, without: Collection[str] = ()) -> bool:
        """Return whether `lower_end` would succeed if the border were further down by `extended`, and these
        adapters were not there."""
        spans = [span for span in self._spans if span[2] not in without]
        end = self._end - size
        if any(start + taken > end for start, taken, name in spans if name in self._fixed):
            return False
        targets = self._packed(spans, end)
        return min(targets.values(), default=end) >= self._begin - extended

    def raise_end(self, size: int) -> None:
        """Move the end up."""
        assert size >= 0
        self._end += size

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
        """Yield (start, size) of each hole below the end, from the border upwards."""
        cursor = self._begin
        for start, size, _ in self._spans:
            top = min(start, self._end)  # while the end is lowered, adapters may lie above it
            if top > cursor:
                yield cursor, top - cursor
            cursor = start + size
        if self._end > cursor:
            yield cursor, self._end - cursor

    def _move_into_holes(self) -> list[Shift] | None:
        """Shift the adapters above the end into holes below it, which copies no others. Return None, and
        change nothing, if they do not fit."""
        before = list(self._spans)
        displaced = [name for start, size, name in before if start + size > self._end]
        shifts: list[Shift] = []
        # The lowest comes first: part of it may be below the end, where those after it go.
        for name in displaced:
            source, size = self._span_of[name]
            self._delete(name)
            fitting = [(hole, start) for start, hole in self._holes() if hole >= size]
            if not fitting:
                self._restore(before)
                return None
            hole, start = min(fitting)
            self._insert(name, start + hole - size, size)
            shifts.append(Shift(name, source, start + hole - size, size))
        return shifts

    def _pack_below_end(self) -> list[Shift]:
        """Shift adapters so that they lie close together below the end, in the same order."""
        targets = self._packed(self._spans, self._end)
        moved = [
            Shift(name, start, targets[name], size)
            for start, size, name in self._spans
            if targets.get(name, start) != start
        ]
        # As they keep their order, one that moves down never goes where one that moves up still lies.
        down = [shift for shift in moved if shift.target < shift.source]
        up = [shift for shift in reversed(moved) if shift.target > shift.source]
        for shift in (*down, *up):
            self._shift(shift.name, shift.target)
        return [*down, *up]

    def _packed(self, spans: Sequence[tuple[int, int, str]], end: int) -> dict[str, int]:
        """Return the starts of all adapters but the fixed ones, close together below an end and around
        those."""
        fixed = [(start, start + size) for start, size, name in spans if name in self._fixed]
        targets, cursor = dict[str, int](), end
        for _, size, name in reversed(spans):
            if name in self._fixed:
                continue
            while fixed and cursor - size < fixed[-1][1]:
                cursor = min(cursor, fixed.pop()[0])
            cursor = targets[name] = cursor - size
        return targets

    def _restore(self, spans: list[tuple[int, int, str]]) -> None:
        self._spans = spans
        self._span_of = {name: (start, size) for start, size, name in spans}

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
