"""Bounds how much a tenant runs beyond its share while others use the engine, so that these keep their pace.

Fair shares alone never leave the engine idle: a tenant that asks for more gets what the others leave. But
then every step is full, each takes longer, and a request of another tenant waits for a place. With a bound, a
tenant that has long asked for much more than its share may run

    as many requests as it is due for its share, by those that the others have
    more, as long as that makes steps longer by no more than the bound, by prediction
    any number, while nobody else uses the engine

The requests that a tenant has are those that run and those that wait, as a mean over the last seconds: were
only the running ones to count, tenants that bound each other would all run ever fewer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.fair_share import FairShare
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.step_features import decode_features

_MEAN_S: Final = 5.0
"""Seconds over which the requests of each tenant are averaged."""
_LEAST: Final = 0.05
"""Mean number of requests below which a tenant does not use the engine."""
_BURST: Final = 2.0
"""How many times its share a tenant may ask for, on the mean, before it is bounded: requests come in
bursts."""


class Borrowing:
    """The requests that each tenant has on the mean, and which others may run. `bound`: share by which steps
    may get longer."""

    def __init__(self, bound: float, fair: FairShare, memory: Memory, costs: DriftWatch | None) -> None:
        self._bound = bound
        self._fair = fair
        self._memory = memory
        self._costs = costs
        self._means: dict[str, float] = {}
        self._shares: dict[str, float] = {}  # of the tenants that use the engine
        self._sum_means = 0.0  # of these, as the sum of their shares
        self._sum_shares = 0.0
        self._now_s = 0.0

    def observe(self, counts: Counter[str], now_s: float) -> None:
        """Record how many requests each tenant has now."""
        weight = 1 - math.exp(-max(now_s - self._now_s, 0.0) / _MEAN_S)
        self._now_s = now_s
        for tenant in {*self._means, *counts}:
            mean = self._means.get(tenant, 0.0)
            self._means[tenant] = mean + weight * (counts[tenant] - mean)
            if self._means[tenant] < _LEAST and counts[tenant] == 0:
                del self._means[tenant]
        self._shares = {each: self._fair.share(each) for each, mean in self._means.items() if mean >= _LEAST}
        self._sum_means = sum(map(self._means.__getitem__, self._shares))
        self._sum_shares = sum(self._shares.values())

    def may_run(self, request: RequestState, running: Sequence[RequestState]) -> bool:
        """Return whether a waiting request may join those that run."""
        tenant = request.request.tenant
        mean = self._means.get(tenant, 0.0)
        own_share = self._shares.get(tenant, 0.0)
        # Next to a share that is larger by sixteen digits, the others' sum is lost.
        others_share = self._sum_shares - own_share
        if others_share <= 0:
            return True
        others_mean = self._sum_means - (mean if own_share else 0.0)
        due = max(self._fair.share(tenant) / others_share * others_mean, 1.0)
        if mean <= _BURST * due:
            return True
        own = [each for each in running if each.request.tenant == tenant]
        num_due = math.ceil(due)
        if len(own) < num_due:
            return True
        return self._costs is not None and self._is_short(request, running, own[num_due:], self._costs)

    def _is_short(
        self,
        request: RequestState,
        running: Sequence[RequestState],
        borrowed: Iterable[RequestState],
        costs: DriftWatch,
    ) -> bool:
        """Return whether steps with a request, and with those that its tenant runs beyond its share, are
        short enough."""
        num_bytes, step_s = self._memory.table.known_bytes, costs.model.step_s
        extra = set(map(id, borrowed))
        without_s = step_s(decode_features([each for each in running if id(each) not in extra], num_bytes))
        return step_s(decode_features([*running, request], num_bytes)) <= (1 + self._bound) * without_s
