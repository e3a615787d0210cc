"""Times several cases in alternation, so that a machine that slows down affects all of them alike."""

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
"""Runs a case once and returns its seconds, without preparation."""
_NEIGHBOURS: Final = 4
"""Number of measurements before and after one that tell the machine's speed at that time."""
_ROUNDS: Final = 8
_FIRST_SHARE: Final = 1 / 3
"""Share of the time in which `time_within` finds out how many cases there is time for."""


def time_alternating(
    cases: Sequence[Timed],
    *,
    repeats: int,
    report: Callable[[float], None] = lambda done: None,
    now_s: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the seconds that each case takes at the machine's usual speed.

    All cases run once untimed (kernels compile, graphs are captured, pages are touched), then all in turn, in
    another order every time. `report` is called with the share of the total time that has passed.
    """
    taken: list[tuple[int, float]] = []
    order, shuffled = list(range(len(cases))), Random(0)
    turns = TurnTimes(len(cases), num_rounds=repeats + 1)
    with quiet_collector():
        for repeat in range(repeats + 1):
            # Cases come sorted by size. In random order, the first of them predict the total time.
            shuffled.shuffle(order)
            for index in order:
                started_s = now_s()
                took_s = cases[index]()
                if repeat > 0:
                    taken.append((index, took_s))
                report(turns.share_after(index, now_s() - started_s))
    return at_usual_pace(taken, len(cases))


def time_within(
    cases: Sequence[Timed],
    *,
    budget_s: float,
    least: int,
    most_repeats: int,
    report: Callable[[float], None] = lambda done: None,
    now_s: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Return the seconds of as many cases as there is time for, by their index.

    They are taken from all parts of the list, and each runs once, for a third of the time; then all of them
    in turn, another time as long as there is time for it. `least` cases are measured whatever it takes. The
    first time of each counts only if there is no time for another.
    """
    started_s = now_s()
    reached: list[int] = []
    first: list[tuple[int, float]] = []
    taken: list[tuple[int, float]] = []
    shuffled = Random(0)
    with quiet_collector():
        for index in _spread(len(cases)):
            if len(reached) >= least and now_s() - started_s > budget_s * _FIRST_SHARE:
                break
            first.append((len(reached), cases[index]()))
            reached.append(index)
            passed_s = now_s() - started_s
            whole_s = max(budget_s, passed_s * max(least / len(reached), 1.0))
            report(passed_s / whole_s if whole_s > 0 else 0.0)
        round_s = now_s() - started_s
        order = list(range(len(reached)))
        for _ in range(most_repeats):
            if now_s() - started_s + round_s > budget_s:
                break
            shuffled.shuffle(order)
            for place in order:
                taken.append((place, cases[reached[place]]()))
                report(min((now_s() - started_s) / budget_s, 1.0))
    return dict(zip(reached, at_usual_pace(taken or first, len(reached)), strict=True))


def _spread(number: int) -> list[int]:
    """Return the indices of a list in an order such that any number of the first ones are from all of it."""
    num_bits = max(number - 1, 1).bit_length()
    mirrored = (int(f"{index:0{num_bits}b}"[::-1], 2) for index in range(2**num_bits))
    return [index for index in mirrored if index < number]


class TurnTimes:
    """Estimates the share of the total time that has passed while cases take turns.

    Uses each case's last duration, with preparation; a case that has not run yet is assumed to take the mean
    of the others.
    """

    def __init__(self, num_cases: int, *, num_rounds: int) -> None:
        self._runs_left = [num_rounds] * num_cases
        self._last_s: dict[int, float] = {}
        self._spent_s = 0.0

    def share_after(self, case: int, took_s: float) -> float:
        """Record a run of the case, and return the share of the total time that has passed."""
        self._last_s[case] = took_s
        self._runs_left[case] -= 1
        self._spent_s += took_s
        mean_s = sum(self._last_s.values()) / len(self._last_s)
        left_s = sum(runs * self._last_s.get(each, mean_s) for each, runs in enumerate(self._runs_left))
        return self._spent_s / (self._spent_s + left_s) if self._spent_s > 0 else 0.0


def at_usual_pace(taken: Sequence[tuple[int, float]], num_cases: int) -> list[float]:
    """Return the seconds of each case, from (case, seconds) in order of time.

    On a shared machine, other programs use part of it for a while, and all measurements meanwhile are slower
    by about the same factor: the factor by which the neighbours in time exceed their own usual. The result is
    the median of each case after dividing by that factor.
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
    """Return the lower quartile of a few consecutive measurements of the same case. Interference from other
    programs only ever adds to them."""
    return sorted(shots_s)[len(shots_s) // 4]


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Turn garbage collection off, so that none runs in the middle of a step. Objects are not frozen for it:
    to thaw them again would thaw what the process had frozen before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
