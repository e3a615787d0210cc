"""Arrival times of requests, regardless of their adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.workload.errors import WorkloadError
from loraplex.workload.gaps import Gaps, GapTable

# Number of draws at once: few enough to use little memory, enough to make numpy worthwhile.
BATCH: Final = 4096


class Arrivals(Protocol):
    """Arrival times in order, from 0, in batches; endless or not."""

    def batches_s(self, rng: np.random.Generator) -> Iterator[FloatArray]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RenewalArrivals:
    """Arrivals with independent gaps at one rate: Poisson, gamma, log-normal, ... according to `gaps`."""

    rate_per_s: float
    gaps: Gaps

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < math.inf:
            raise WorkloadError(f"rate must be finite and more than 0, not {self.rate_per_s:g}")

    def batches_s(self, rng: np.random.Generator) -> Iterator[FloatArray]:
        table = GapTable.of([self.gaps])
        who = np.zeros(BATCH, dtype=np.int64)
        last_s = 0.0
        gaps = table.draw(rng, who)
        gaps[:1] = table.draw_first(rng, who[:1])
        while True:
            times_s = last_s + np.cumsum(gaps) / self.rate_per_s
            last_s = float(times_s[-1])
            yield times_s
            gaps = table.draw(rng, who)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayArrivals:
    """The arrival times of another workload, `speed` times as fast."""

    times_s: Callable[[], Iterator[float]]
    speed: float = 1.0

    def batches_s(self, rng: np.random.Generator) -> Iterator[FloatArray]:
        times_s = self.times_s()
        while (batch := np.fromiter(islice(times_s, BATCH), dtype=np.float64)).size:
            yield batch / self.speed
