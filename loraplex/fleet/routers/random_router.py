"""A router that picks any replica with equal probability."""

from __future__ import annotations

import random

from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.view import FleetView


class RandomRouter:
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates = view.candidates(request)
        return int(candidates[self._random.randrange(len(candidates))])
