"""dLoRA's policy: the replica where a request's first step begins soonest.

It waits for the prompts before it, for a place in the batch if all are taken, and for its adapter if the
replica does not have it.
"""

from __future__ import annotations

import numpy as np

from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView


class PendingTimeRouter:
    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates, load, costs = view.candidates(request), view.load, view.costs
        exists, queue = load.everything.at(candidates), load.waiting.at(candidates)
        max_running = load.max_running[candidates]
        # A place is free when as many answers have ended as there are requests too many. Answers that run
        # together end evenly over the duration of one of them.
        too_many = np.maximum(exists.num_requests + 1 - max_running, 0)
        answer_s = load.answers.mean_tokens * costs.decode_s(exists.at_most(max_running))
        waits_s = costs.prefill_s(queue) + answer_s * too_many / max_running
        pending_s = waits_s + view.load_s(request, candidates)
        return self._turns.pick(candidates, pending_s, exists.num_requests)
