"""A router: which replicas may serve a request, what each of them would cost, and which one is picked."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loraplex.fleet.arrays import IntArray
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.view import FleetView


class Router(Protocol):
    """Decides where a request goes. It looks at the view and changes nothing but its own memory."""

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        """Return the number of a replica that accepts requests."""
        ...


class Turns:
    """Breaks ties: of replicas that are equally good, each in turn."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, candidates: IntArray, *costs: npt.NDArray[Any]) -> int:
        """Return the candidate with the lowest first cost; among equals the second decides, and so on."""
        left = np.arange(len(candidates))
        for cost in costs:
            found = cost[left]
            left = left[found == found.min()]
            if len(left) == 1:
                return int(candidates[left[0]])
        equals = candidates[left]
        # The first at or after the turn: replicas that come and go do not shift everybody's turn.
        place = int(np.searchsorted(equals, self._next))
        chosen = int(equals[place if place < len(equals) else 0])
        self._next = chosen + 1
        return chosen
