"""Traffic: batches of arrival times with adapters, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.workload.arrivals import BATCH, Arrivals
from loraplex.workload.popularity import Popularity
from loraplex.workload.rates import Rates, RateWindow
from loraplex.workload.streams import Purpose, stream

Batch = tuple[FloatArray, IntArray]


class Traffic(Protocol):
    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield (times, adapters) from 0 on, endless or not; the same for the same seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTraffic:
    """One stream of arrivals, each for an adapter drawn by popularity. A popularity that shifts reaches its
    end after `duration_s`."""

    arrivals: Arrivals
    popularity: Popularity
    duration_s: float | None

    def batches(self, seed: int) -> Iterator[Batch]:
        draws = stream(seed, Purpose.ADAPTERS)
        first = 0
        for times_s in self.arrivals.batches_s(stream(seed, Purpose.ARRIVALS)):
            progress = progress_at(times_s, self.duration_s)
            yield times_s, self.popularity.draw(draws, first=first, progress=progress)
            first += times_s.size


def progress_at(times_s: FloatArray, duration_s: float | None) -> FloatArray:
    return np.zeros(times_s.size) if duration_s is None else np.minimum(times_s / duration_s, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PerAdapterTraffic:
    """Independent arrivals for each adapter."""

    rates: Rates

    def batches(self, seed: int) -> Iterator[Batch]:
        arrivals = stream(seed, Purpose.ARRIVALS)
        for window in self.rates.windows(stream(seed, Purpose.RATE_CHANGES)):
            yield from _window_batches(arrivals, window)


def _window_batches(rng: np.random.Generator, window: RateWindow) -> Iterator[Batch]:
    """Yield the arrivals of all adapters in time steps short enough for a batch.

    `left` is the distance to each adapter's next arrival in units of its mean gap, so a rate of 0 never gets
    there.
    """
    rates = window.rates_per_s
    if not rates.any():
        return
    left = window.gaps.draw_first(rng, np.arange(rates.size))
    step_s = BATCH / float(rates.sum())
    start_s = window.start_s
    while start_s < window.end_s:
        end_s = min(start_s + step_s, window.end_s)
        budget = rates * (end_s - start_s)
        times_s, adapters = [np.empty(0)], [np.empty(0, dtype=np.int64)]
        due = np.flatnonzero(left < budget)
        while due.size:
            times_s.append(start_s + left[due] / rates[due])
            adapters.append(due)
            left[due] += window.gaps.draw(rng, due)
            due = due[left[due] < budget[due]]
        left -= budget
        yield in_order(np.minimum(np.concatenate(times_s), end_s), np.concatenate(adapters))
        start_s = end_s


def in_order(times_s: FloatArray, adapters: IntArray) -> Batch:
    order = np.argsort(times_s, kind="stable")
    return times_s[order], adapters[order]
