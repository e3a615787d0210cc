"""Times several things side by side, so that a machine that slows down slows all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import exp, log
from random import Random
from statistics import median
from typing import Final

Timed = Callable[[], float]
"""Does something once and returns its seconds, without what it takes to prepare it."""
_NEIGHBOURS: Final = 4
"""Measurements before and after one by which the machine's pace is told."""
_ROUNDS: Final = 8


def time_alternating(
    cases: Sequence[Timed],
    *,
    repeats: int,
    report: Callable[[float], None] = lambda done: None,
    now_s: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """What each takes at the machine's usual pace. All run once before time counts (kernels compile, graphs
    are captured, pages are touched), then all in turn, in another order every time. `report` gets the share
    of the time that is over."""
    taken: list[tuple[int, float]] = []
    order, shuffled = list(range(len(cases))), Random(0)
    turns = TurnTimes(len(cases), num_rounds=repeats + 1)
    with quiet_collector():
        for repeat in range(repeats + 1):
            # Cases come sorted by size. Shuffled, the first of them tell what all will take.
            shuffled.shuffle(order)
            for index in order:
                started_s = now_s()
                took_s = cases[index]()
                if repeat > 0:
                    taken.append((index, took_s))
                report(turns.share_after(index, now_s() - started_s))
    return at_usual_pace(taken, len(cases))


class TurnTimes:
    """The share of the time that is over while cases take turns, by what each took the last time, with what
    it takes to prepare it. A case that did not run yet is taken for the mean of those that did."""

    def __init__(self, num_cases: int, *, num_rounds: int) -> None:
        self._runs_left = [num_rounds] * num_cases
        self._last_s: dict[int, float] = {}
        self._spent_s = 0.0

    def share_after(self, case: int, took_s: float) -> float:
        """Count a run of the case, and return the share of the time of all runs that is over."""
        self._last_s[case] = took_s
        self._runs_left[case] -= 1
        self._spent_s += took_s
        mean_s = sum(self._last_s.values()) / len(self._last_s)
        left_s = sum(runs * self._last_s.get(each, mean_s) for each, runs in enumerate(self._runs_left))
        return self._spent_s / (self._spent_s + left_s) if self._spent_s > 0 else 0.0


def at_usual_pace(taken: Sequence[tuple[int, float]], num_cases: int) -> list[float]:
    """The seconds of each case, from (case, seconds) in the order of time.

    On a machine that is shared, others take a part of it for a while, and all that is measured meanwhile is
    slower by about the same factor: by how much its neighbours in time are over their own usual. Without that
    factor, the median of each.
    """
    logs_of: list[list[float]] = [[] for _ in range(num_cases)]
    for case, took_s in taken:
        logs_of[case].append(log(took_s))
    usual = [median(logs) for logs in logs_of]
    for _ in range(_ROUNDS):
        over = [log(took_s) - usual[case] for case, took_s in taken]
        pace = [median(over[max(at - _NEIGHBOURS, 0) : at + _NEIGHBOURS + 1]) for at in range(len(over))]
        middle = median(pace)
        logs_of = [[] for _ in range(num_cases)]
        for (case, took_s), factor in zip(taken, pace, strict=True):
            logs_of[case].append(log(took_s) - factor + middle)
        usual = [median(logs) for logs in logs_of]
    return [exp(each) for each in usual]


def undisturbed(shots_s: Sequence[float]) -> float:
    """Of a few measurements of the same, one right after the other: the lower quartile. Whatever else the
    machine does in between only ever adds to them."""
    return sorted(shots_s)[len(shots_s) // 4]


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
