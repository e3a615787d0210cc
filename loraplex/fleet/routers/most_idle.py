"""A router that picks the replica with the fewest requests, including waiting ones."""

from __future__ import annotations

from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView


class MostIdleRouter:
    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates = view.candidates(request)
        return self._turns.pick(candidates, view.load.everything.num_requests[candidates])
