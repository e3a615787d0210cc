"""Rates of individual adapters, constant or changing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.workload.errors import WorkloadError
from loraplex.workload.gaps import Gaps, GapTable


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RateWindow:
    """An interval with constant rates: requests per second of each adapter, and the gaps between them."""

    start_s: float
    end_s: float
    rates_per_s: FloatArray
    gaps: GapTable


class Rates(Protocol):
    def windows(self, rng: np.random.Generator) -> Iterator[RateWindow]:
        """Yield consecutive windows, from 0 to infinity."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConstantRates:
    rates_per_s: FloatArray
    gaps: Gaps

    def windows(self, rng: np.random.Generator) -> Iterator[RateWindow]:
        gaps = GapTable.of([self.gaps] * self.rates_per_s.size)
        yield RateWindow(start_s=0.0, end_s=math.inf, rates_per_s=self.rates_per_s, gaps=gaps)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChangingRates:
    """The "unpredictable arrivals" of the adapter-twin paper.

    Every `every_s` each adapter's rate is multiplied or divided by `factor`, within the bounds, and its gaps
    are chosen from `choices`, both at random. It starts with `rates_per_s` and the first choice.
    """

    rates_per_s: FloatArray
    every_s: float
    factor: float
    least_per_s: float
    most_per_s: float
    choices: tuple[Gaps, ...]

    def __post_init__(self) -> None:
        if not 0 < self.every_s < math.inf:
            raise WorkloadError(f"change_every_s must be more than 0, not {self.every_s:g}")
        if not 1 <= self.factor < math.inf:
            raise WorkloadError(f"change_factor must be at least 1, not {self.factor:g}")
        if not 0 < self.least_per_s <= self.most_per_s < math.inf:
            raise WorkloadError(f"rate bounds: {self.least_per_s:g} to {self.most_per_s:g} is no range")

    def windows(self, rng: np.random.Generator) -> Iterator[RateWindow]:
        rates_per_s = np.clip(self.rates_per_s, self.least_per_s, self.most_per_s)
        chosen = np.zeros(rates_per_s.size, dtype=np.int64)
        number = 0
        while True:
            yield RateWindow(
                start_s=number * self.every_s,
                end_s=(number + 1) * self.every_s,
                rates_per_s=rates_per_s,
                gaps=GapTable.of([self.choices[place] for place in chosen.tolist()]),
            )
            up = rng.random(rates_per_s.size) < 0.5
            moved = np.where(up, rates_per_s * self.factor, rates_per_s / self.factor)
            rates_per_s = np.clip(moved, self.least_per_s, self.most_per_s)
            chosen = rng.integers(len(self.choices), size=rates_per_s.size)
            number += 1
