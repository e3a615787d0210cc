"""Numbers of adapters at which a GPU is tested, and numbers of slots that it may have."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from loraplex.planner.judge import Judge

SLOT_COUNTS: Final = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 576)
"""The digital-twin paper's list up to 384, continued in its last step."""


def each_testing_point() -> Iterator[int]:
    """Yield the numbers of adapters to test a GPU at, ascending and without end: first those of SLOT_COUNTS,
    then each an eighth more than the one before."""
    yield from SLOT_COUNTS
    point = SLOT_COUNTS[-1]
    while True:
        point += point // 8
        yield point


def next_slot_count(num_slots: int, max_rank: int, judge: Judge) -> int | None:
    """Return the next number of slots after this one; None if there is none that fits a GPU's memory."""
    position = bisect_right(SLOT_COUNTS, num_slots)
    if position == len(SLOT_COUNTS) or not judge.fits(max_rank, SLOT_COUNTS[position]):
        return None
    return SLOT_COUNTS[position]
