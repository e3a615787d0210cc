"""Gaps between arrivals, with mean 1: they say how bursty arrivals are, not how many.

Dividing gaps by a rate gives seconds. `Gaps` describes one process, `GapTable` draws for many at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.workload.errors import WorkloadError

# Below these shapes nearly all gaps are 0, and the mean depends on one in millions: no sample would have it.
_LEAST_SHAPE: Final = 1e-3
_LEAST_WEIBULL_SHAPE: Final = 0.1
_MOST_CV: Final = 100.0


class GapKind(IntEnum):
    """The distribution of gaps. `shape` is k for gamma and Weibull, sigma of the logarithm for log-normal;
    the others have none."""

    POISSON = 0
    GAMMA = 1
    LOG_NORMAL = 2
    WEIBULL = 3
    REGULAR = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """A distribution of gaps. The coefficient of variation (CV) is 1 for Poisson, more is bursty, 0 is
    regular."""

    kind: GapKind
    shape: float = 1.0

    def __post_init__(self) -> None:
        least = _LEAST_WEIBULL_SHAPE if self.kind is GapKind.WEIBULL else _LEAST_SHAPE
        if not least <= self.shape < math.inf:
            raise WorkloadError(f"the shape of {self.kind.name} gaps must be at least {least}")

    @classmethod
    def poisson(cls) -> Gaps:
        return cls(kind=GapKind.POISSON)

    @classmethod
    def gamma(cls, *, cv: float) -> Gaps:
        return cls(kind=GapKind.GAMMA, shape=1 / _checked(cv) ** 2)

    @classmethod
    def log_normal(cls, *, cv: float) -> Gaps:
        return cls(kind=GapKind.LOG_NORMAL, shape=math.sqrt(math.log1p(_checked(cv) ** 2)))

    @classmethod
    def weibull(cls, *, shape: float) -> Gaps:
        return cls(kind=GapKind.WEIBULL, shape=shape)

    @classmethod
    def regular(cls) -> Gaps:
        return cls(kind=GapKind.REGULAR)


def _checked(cv: float) -> float:
    # A gamma of CV 0.01 is practically regular, and one of CV 100 has most of its requests in one instant.
    if not 0.01 <= cv <= _MOST_CV:
        raise WorkloadError(f"cv must be from 0.01 to {_MOST_CV:g}, not {cv:g}; 0 is what regular gaps have")
    return cv


class GapTable:
    """Gaps of many processes, each with its own kind and shape."""

    def __init__(self, kinds: IntArray, shapes: FloatArray) -> None:
        self._kinds = kinds
        self._shapes = shapes
        self._present = [GapKind(kind) for kind in np.unique(kinds)]

    @classmethod
    def of(cls, gaps: Sequence[Gaps]) -> GapTable:
        kinds = np.array([each.kind for each in gaps], dtype=np.int64)
        return cls(kinds, np.array([each.shape for each in gaps], dtype=np.float64))

    def draw(self, rng: np.random.Generator, who: IntArray) -> FloatArray:
        """Return one gap for each of the processes in `who`, which may list one several times."""
        return self._draw(rng, who, biased=False)

    def draw_first(self, rng: np.random.Generator, who: IntArray) -> FloatArray:
        """Return the time from an arbitrary moment to the next arrival, for processes in steady state.

        If the first gap were drawn like the others, bursty processes would start with a burst and exceed
        their rate. A moment falls into a gap with probability proportional to its length, and anywhere within
        it.
        """
        return self._draw(rng, who, biased=True) * rng.random(who.size)

    def _draw(self, rng: np.random.Generator, who: IntArray, *, biased: bool) -> FloatArray:
        if len(self._present) == 1:
            return _gaps(rng, self._present[0], self._shapes[who], biased=biased)
        drawn = np.empty(who.size)
        kinds = self._kinds[who]
        for kind in self._present:
            mask = kinds == kind
            drawn[mask] = _gaps(rng, kind, self._shapes[who[mask]], biased=biased)
        return drawn


def _gaps(rng: np.random.Generator, kind: GapKind, shapes: FloatArray, *, biased: bool) -> FloatArray:
    """Return gaps with mean 1; `biased`: drawn in proportion to their length."""
    match kind:
        case GapKind.POISSON:
            return rng.standard_gamma(2.0, shapes.size) if biased else rng.standard_exponential(shapes.size)
        case GapKind.GAMMA:
            return rng.standard_gamma(shapes + 1 if biased else shapes) / shapes
        case GapKind.LOG_NORMAL:
            middle = shapes**2 / 2 if biased else -(shapes**2) / 2
            return np.exp(rng.standard_normal(shapes.size) * shapes + middle)
        case GapKind.WEIBULL:
            powers = rng.standard_gamma(1 + 1 / shapes if biased else np.ones_like(shapes))
            return powers ** (1 / shapes) / _weibull_means(shapes)
        case GapKind.REGULAR:
            return np.ones(shapes.size)


def _weibull_means(shapes: FloatArray) -> FloatArray:
    distinct, place = np.unique(shapes, return_inverse=True)
    return np.array([math.gamma(1 + 1 / shape) for shape in distinct])[place]
