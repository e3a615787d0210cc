"""The LoRA affinity of llm-d's router (gateway-api-inference-extension), with its scores for queue and KV
memory.

Scores are in [0, 1] and are added: 1.0 for a replica where the adapter is in use, 0.8 where there is room for
one more, 0.6 where requests wait for it, 0.0 where all places for adapters are taken; then how short the
queue is among the candidates, and how much KV memory is free. It only knows adapters in flight.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.fleet.load import FleetLoad
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView

ACTIVE: Final = 1.0
ROOM: Final = 0.8
WAITING: Final = 0.6
FULL: Final = 0.0


class AffinityRouter:
    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates, load = view.candidates(request), view.load
        queue = load.waiting.num_requests[candidates]
        spread = max(int(queue.max() - queue.min()), 1)
        short_queue = (queue.max() - queue) / spread
        free_kv = 1.0 - np.minimum(load.everything.kv_tokens[candidates] / load.kv_capacity[candidates], 1.0)
        score = _affinity(request.adapter, candidates, load) + short_queue + free_kv
        return self._turns.pick(candidates, -score)


def _affinity(adapter: int | None, candidates: IntArray, load: FleetLoad) -> FloatArray:
    if adapter is None:
        return np.zeros(len(candidates))
    has_room = load.everything.num_adapters < load.max_adapters
    scores: FloatArray = np.where(has_room, ROOM, FULL)
    waiting = load.waiting_on(adapter)
    for replica, in_flight in load.in_flight(adapter).items():
        if in_flight > waiting.get(replica, 0):
            scores[replica] = ACTIVE
        elif not has_room[replica]:
            scores[replica] = WAITING
    return scores[candidates]
