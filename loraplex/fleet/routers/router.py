"""The interface of routers, and their tie-breaking."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loraplex.core.arrays import IntArray
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.view import FleetView


class Router(Protocol):
    """Decides where a request goes. It reads the view and changes only its own state."""

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        """Return the number of a replica that accepts requests."""
        ...


class Turns:
    """Breaks ties: picks the least recently picked of equally good replicas.

    Requests may have different candidates; still every replica has its turn, at the latest when all the
    others have been picked once since.
    """

    def __init__(self) -> None:
        self._num_picks = 0
        self._last_pick: IntArray = np.zeros(0, np.int64)

    def pick(self, candidates: IntArray, *costs: npt.NDArray[Any]) -> int:
        """Return the candidate with the lowest first cost; among equals the second decides, and so on.

        `candidates`: ascending, at least one. `costs`: a number for each of them.
        """
        equals = candidates
        if costs:
            left = _lowest(costs[0])
            for cost in costs[1:]:
                if len(left) == 1:
                    break
                left = left[_lowest(cost[left])]
            equals = candidates[left]
        num_known = int(candidates[-1]) + 1
        if len(self._last_pick) < num_known:
            self._last_pick = np.pad(self._last_pick, (0, num_known - len(self._last_pick)))
        chosen = int(equals[self._last_pick[equals].argmin()])
        self._num_picks += 1
        self._last_pick[chosen] = self._num_picks
        return chosen


def _lowest(cost: npt.NDArray[Any]) -> IntArray:
    """Return the positions of the lowest cost, by methods that take half the time of `min` and
    `flatnonzero`."""
    places: IntArray = (cost == cost[cost.argmin()]).nonzero()[0]
    return places
