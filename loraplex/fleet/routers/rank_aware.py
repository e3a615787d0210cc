"""The policy of CaraServe and Toppings (Algorithm 1): the replica whose requests a new one slows down least.

A request slows down every request of its replica: waiting ones by its prompt, and all by the longer decode
step with its rank in it. A replica where a decode step would then take longer than the SLO is chosen only if
all others would break the SLO too. Only replicas with KV memory for the request are considered.

Choices that the papers leave open: if no replica has memory for it, all are considered, and the chosen one
queues it; a replica without requests costs nothing, although zero times an infinite penalty is undefined; if
all break the SLO, the cheapest of them is chosen; ties go to fewer requests, then in turn; a decode step
counts all requests of a replica, even if it cannot run all of them at once.
"""

from __future__ import annotations

from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.added_costs import AddedCosts
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView


class RankAwareRouter:
    def __init__(self) -> None:
        self._added = AddedCosts()
        self._turns = Turns()

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates = view.with_room(request, view.candidates(request))
        added = self._added.of(request, view, candidates)
        per_request_s = added.prefill_s / view.load.answers.mean_tokens + added.decode_more_s
        total_s = per_request_s * added.num_requests
        if view.slo_s is None:
            return self._turns.pick(candidates, total_s, added.num_requests)
        return self._turns.pick(candidates, added.decode_s > view.slo_s, total_s, added.num_requests)
