"""Times several things side by side, so that a machine that slows down slows all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

Timed = Callable[[], float]
"""Does something once and returns its seconds, without what it takes to prepare it."""


def time_alternating(
    cases: Sequence[Timed], *, repeats: int, report: Callable[[float], None] = lambda done: None
) -> list[float]:
    """The median of each. All run once before time counts (kernels compile, graphs are captured, pages are
    touched), then all in turn, forwards and backwards. `report` gets the share that is done."""
    seconds: list[list[float]] = [[] for _ in cases]
    num_done, num_runs = 0, len(cases) * (repeats + 1)
    with quiet_collector():
        for repeat in range(repeats + 1):
            numbered = list(enumerate(cases))
            for index, case in reversed(numbered) if repeat % 2 else numbered:
                took_s = case()
                if repeat > 0:
                    seconds[index].append(took_s)
                num_done += 1
                report(num_done / num_runs)
    return [median(each) for each in seconds]


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No collection of garbage in the middle of a step; what is built by now is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
