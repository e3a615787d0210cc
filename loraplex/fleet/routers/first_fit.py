"""Punica's policy: the first replica that has room, in a fixed order.

Replicas at the front fill up; those at the end stay empty and could be switched off.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView

MAX_BATCH: Final = 32
"""Most requests that Punica gives a GPU."""


class FirstFitRouter:
    def __init__(self, max_batch: int = MAX_BATCH) -> None:
        self._max_batch = max_batch
        self._turns = Turns()

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        """Return the first replica with room. If none has room, the one with the fewest requests queues
        it."""
        candidates, load = view.candidates(request), view.load
        num_requests = load.everything.num_requests[candidates]
        max_requests = np.minimum(self._max_batch, load.max_running[candidates])
        has_room = (num_requests < max_requests) & load.has_room(request)[candidates]
        if has_room.any():
            return int(candidates[has_room.argmax()])
        return self._turns.pick(candidates, num_requests)
