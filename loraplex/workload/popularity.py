"""Popularity: the adapter of each request, by shares of the traffic that may shift over time.

Shares "by rank" first give each distinct rank its share, smaller ranks more, as in the LoRAServe paper;
adapters of one rank share theirs equally.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.workload.errors import WorkloadError

_HOT_SHARE: Final = 0.5


class Popularity(Protocol):
    """A way to draw adapters. `first`: number of requests drawn before. `progress`: each request's position
    in the workload, from 0 to 1."""

    def draw(self, rng: np.random.Generator, *, first: int, progress: FloatArray) -> IntArray: ...

    def mean_shares(self) -> FloatArray:
        """Return the share of each adapter over the whole workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InTurn:
    """Adapters in turn, 0, 1, 2, ...: with more adapters than requests, every request has its own."""

    num_adapters: int

    def draw(self, rng: np.random.Generator, *, first: int, progress: FloatArray) -> IntArray:
        return np.arange(first, first + progress.size, dtype=np.int64) % self.num_adapters

    def mean_shares(self) -> FloatArray:
        return uniform_shares(self.num_adapters)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shares:
    """Popularity with constant shares."""

    shares: FloatArray

    def draw(self, rng: np.random.Generator, *, first: int, progress: FloatArray) -> IntArray:
        return _places(self.shares, rng.random(progress.size))

    def mean_shares(self) -> FloatArray:
        return self.shares


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShiftingShares:
    """Popularity that moves linearly from one set of shares to another."""

    start: FloatArray
    end: FloatArray

    def draw(self, rng: np.random.Generator, *, first: int, progress: FloatArray) -> IntArray:
        # A mixture of both sets whose weight is the progress yields exactly that line, for every adapter.
        is_end = rng.random(progress.size) < progress
        drawn = rng.random(progress.size)
        return np.where(is_end, _places(self.end, drawn), _places(self.start, drawn))

    def mean_shares(self) -> FloatArray:
        return (self.start + self.end) / 2


def uniform_shares(count: int) -> FloatArray:
    return np.full(count, 1 / count)


def zipf_shares(count: int, exponent: float) -> FloatArray:
    """Return shares proportional to 1 / i^exponent for the i-th adapter."""
    _check_skew(exponent)
    return _normalized(np.arange(1, count + 1, dtype=np.float64) ** -exponent)


def exponential_shares(count: int, decay: float) -> FloatArray:
    """Return shares that fall by e^(decay / count) from each to the next, about e^decay from first to
    last."""
    _check_skew(decay)
    return _normalized(np.exp(-decay * np.arange(count) / count))


def zipf_within_rank(ranks: Sequence[int], exponent: float) -> FloatArray:
    """Give every rank an equal share, divided among its adapters in proportion to 1 / i^exponent."""
    distinct, place = np.unique(np.asarray(ranks), return_inverse=True)
    shares = np.empty(place.size)
    for number in range(distinct.size):
        adapters = np.flatnonzero(place == number)
        shares[adapters] = zipf_shares(adapters.size, exponent) / distinct.size
    return shares


def power_by_rank(ranks: Sequence[int], alpha: float) -> FloatArray:
    """Give the x-th smallest rank a share proportional to x^-alpha."""
    return _by_rank(ranks, zipf_shares(len(set(ranks)), alpha))


def exponential_by_rank(ranks: Sequence[int], decay: float) -> FloatArray:
    return _by_rank(ranks, exponential_shares(len(set(ranks)), decay))


def shifting_skew(ranks: Sequence[int], hot_share: float = _HOT_SHARE) -> ShiftingShares:
    """Give the largest rank half of the traffic at first, the smallest at the end; the others share
    evenly."""
    num_ranks = len(set(ranks))
    if num_ranks < 2:
        raise WorkloadError("ranks: a skew that shifts from rank to rank needs two or more")
    cold = np.full(num_ranks, (1 - hot_share) / (num_ranks - 1))
    start, end = cold.copy(), cold.copy()
    start[-1] = end[0] = hot_share
    return ShiftingShares(start=_by_rank(ranks, start), end=_by_rank(ranks, end))


def shares_like(totals: Sequence[float], count: int) -> FloatArray:
    """Return shares as skewed as these totals, for any number of adapters, the busiest first.

    If `count` differs from the number of totals, shares are interpolated at evenly spaced places on the curve
    of sorted totals (of their logarithms, as they spread over many powers of ten).
    """
    sizes = np.sort(np.array([total for total in totals if total > 0], dtype=np.float64))[::-1]
    if not sizes.size:
        raise WorkloadError("popularity: every total is 0")
    if sizes.size == count:
        return _normalized(sizes)
    known = (np.arange(sizes.size) + 0.5) / sizes.size
    wanted = (np.arange(count) + 0.5) / count
    return _normalized(np.exp(np.interp(wanted, known, np.log(sizes))))


def _by_rank(ranks: Sequence[int], rank_shares: FloatArray) -> FloatArray:
    """Return each adapter's share; `rank_shares` are those of the distinct ranks, the smallest first."""
    _, place, counts = np.unique(np.asarray(ranks), return_inverse=True, return_counts=True)
    return (rank_shares / counts)[place]


def _places(shares: FloatArray, drawn: FloatArray) -> IntArray:
    ends = np.cumsum(shares)
    places: IntArray = np.searchsorted(ends, drawn * ends[-1], side="right").astype(np.int64)
    return np.minimum(places, shares.size - 1)


def _normalized(weights: FloatArray) -> FloatArray:
    shares: FloatArray = weights / weights.sum()
    return shares


def _check_skew(skew: float) -> None:
    if not 0 <= skew < math.inf:
        raise WorkloadError(f"skew must be finite and not negative, not {skew:g}")
