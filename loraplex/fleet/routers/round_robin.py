"""A router that lets replicas take turns, skipping those that may not serve a request."""

from __future__ import annotations

from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView


class RoundRobinRouter:
    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        return self._turns.pick(view.candidates(request))
