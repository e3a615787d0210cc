"""The bound on what a tenant runs beyond its share while others use an engine.

The schedule asks this for each step (`scheduling.borrowing`), and the forecast by which a server refuses
requests, too (`fleet.first_token`).

A tenant that has long asked for much more than its share may run

    as many requests as it is due for its share, by those that the others have
    more, as long as that makes steps no longer than `longest_step_s`
    any number, while nobody else uses the engine

The requests that a tenant has are those that run and those that wait, as a mean over the last seconds: were
only the running ones to count, tenants that bound each other would all run ever fewer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

_MEAN_S: Final = 5.0
"""Seconds over which the requests of each tenant are averaged."""
_LEAST: Final = 0.05
"""Mean number of requests below which a tenant does not use the engine."""
_BURST: Final = 2.0
"""A tenant that asks for more than this times its share, on the mean, is bounded: requests come in bursts.
It stays bounded until it asks for no more than its share: a server that refuses what it asks for
makes it seem to ask for less."""


class DuePlaces:
    """The requests that each tenant has on the mean. `share`: returns the share of a tenant."""

    def __init__(self, share: Callable[[str], float]) -> None:
        self._share = share
        self._counts: Counter[str] = Counter()
        self._means: dict[str, tuple[float, float]] = {}  # and when they were that
        self._used: dict[str, float] = {}  # means of the tenants that use the engine
        self._shares: dict[str, float] = {}
        self._sum_means = 0.0  # of these, as the sum of their shares
        self._sum_shares = 0.0
        self._bounded: set[str] = set()

    def change(self, tenant: str, num_requests: int, now_s: float) -> None:
        """Record that a tenant has so many requests more, or fewer."""
        mean, count = self._mean(tenant, now_s), self._counts[tenant] + num_requests
        assert count >= 0
        _, before_s = self._means.get(tenant, (0.0, now_s))
        self._means[tenant], self._counts[tenant] = (mean, max(now_s, before_s)), count
        if count == 0:
            del self._counts[tenant]

    def observe(self, now_s: float) -> None:
        """Decide who is bounded from now on."""
        means = {each: self._mean(each, now_s) for each in self._means}
        for tenant, mean in means.items():
            if mean < _LEAST and tenant not in self._counts:
                del self._means[tenant]
        self._used = {each: mean for each, mean in means.items() if mean >= _LEAST}
        self._shares = {each: self._share(each) for each in self._used}
        self._sum_means = sum(self._used.values())
        self._sum_shares = sum(self._shares.values())
        self._bounded = {each for each in self._used if self._is_beyond(each)}

    def _mean(self, tenant: str, now_s: float) -> float:
        """Return the mean by now. The count has been what it is since the last change."""
        mean, at_s = self._means.get(tenant, (0.0, now_s))
        weight = 1 - math.exp(-max(now_s - at_s, 0.0) / _MEAN_S)
        return mean + weight * (self._counts[tenant] - mean)

    def due(self, tenant: str) -> float | None:
        """Return how many requests a tenant is due to run; None while nothing bounds it."""
        return self._due(tenant) if tenant in self._bounded else None

    def _is_beyond(self, tenant: str) -> bool:
        """Return whether a tenant is bounded from now on."""
        due, times = self._due(tenant), 1.0 if tenant in self._bounded else _BURST
        return due is not None and self._used[tenant] > times * due

    def _due(self, tenant: str) -> float | None:
        """Return how many requests a tenant is due to run; None if nobody else uses the engine."""
        own_share = self._shares.get(tenant, 0.0)
        # Next to a share that is larger by sixteen digits, the others' sum is lost.
        others_share = self._sum_shares - own_share
        if others_share <= 0:
            return None
        others_mean = self._sum_means - self._used[tenant]
        return max(own_share / others_share * others_mean, 1.0)


def longest_step_s(due_step_s: float, bound: float | None, paces_s: Iterable[float]) -> float:
    """Return how long a step may take with what a tenant runs beyond its due. `due_step_s`: without that.
    `bound`: share by which it may take longer; None for any. `paces_s`: the seconds for each token that
    running requests of the others should take at most. One that is missed anyway bounds nothing."""
    most_s = math.inf if bound is None else (1 + bound) * due_step_s
    return min((most_s, *(pace_s for pace_s in paces_s if pace_s >= due_step_s)))
