"""Bounds how much a tenant runs beyond its share while others use the engine, so that these keep their pace.

Fair shares alone never leave the engine idle: a tenant that asks for more gets what the others leave. But
then every step is full, each takes longer, and a request of another tenant waits for a place. So a tenant
that asks for much more than its share runs more than it is due (`core.due_places`) only

    as long as steps get longer by no more than a bound, if there is one
    as long as running requests of the others keep their objectives for the time per token (`slo_tpt`)

both by the predicted time of a step in which all of them decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from loraplex.core.due_places import DuePlaces, longest_step_s
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.fair_share import FairShare
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.step_features import decode_features


class Borrowing:
    """Which waiting requests may run. `places`: the requests that each tenant has on the mean. `bound`: share
    by which steps may get longer; None for any, as long as objectives are kept."""

    def __init__(
        self,
        bound: float | None,
        fair: FairShare,
        places: DuePlaces,
        memory: Memory,
        costs: DriftWatch | None,
    ) -> None:
        self._bound = bound
        self._fair = fair
        self._memory = memory
        self._costs = costs
        self.places = places

    @property
    def is_bounded(self) -> bool:
        """Return whether there is anything to decide: a bound, or an objective that could be missed."""
        return self._bound is not None or (self._fair.has_paces and self._costs is not None)

    def may_run(self, request: RequestState, running: Sequence[RequestState]) -> bool:
        """Return whether a waiting request may join those that run."""
        tenant = request.request.tenant
        due = self.places.due(tenant)
        if due is None:
            return True
        own, paces_s = [], []
        for each in running:
            if each.request.tenant == tenant:
                own.append(each)
            elif each.slo_tpt_s is not None:
                paces_s.append(each.slo_tpt_s)
        num_due = math.ceil(due)
        if len(own) < num_due or (self._bound is None and not paces_s):
            return True
        if self._costs is None:
            return False
        num_bytes, step_s = self._memory.table.known_bytes, self._costs.model.step_s
        borrowed = set(map(id, own[num_due:]))
        within_due = [each for each in running if id(each) not in borrowed]
        most_s = longest_step_s(step_s(decode_features(within_due, num_bytes)), self._bound, paces_s)
        return step_s(decode_features([*running, request], num_bytes)) <= most_s
