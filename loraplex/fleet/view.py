"""The fleet as routers see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.core.errors import CapacityError
from loraplex.fleet.load import FleetLoad
from loraplex.fleet.plan import Plan
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.tiers import AdapterTiers
from loraplex.perf.set_costs import SetCosts


class AdapterMoves(Protocol):
    """The seconds until a replica can compute with an adapter that it does not have."""

    def from_host_s(self, adapter: int) -> float:
        """Return the seconds of a load from the replica's own host memory to its device."""
        ...

    def from_elsewhere_s(self, adapter: int) -> float:
        """Return the seconds of a copy to the replica's host memory, from another replica or from disk."""
        ...


@dataclass(kw_only=True, slots=True)
class FleetView:
    """The fleet as routers see it; only the fleet's controller changes it.

    `plan`: None while every replica may serve every adapter. `slo_s`: seconds per token that a request may
    take; None if there is no SLO. `costs`: the costs of sets of requests on one replica.
    """

    load: FleetLoad
    tiers: AdapterTiers
    costs: SetCosts
    moves: AdapterMoves
    plan: Plan | None = None
    slo_s: float | None = None

    def candidates(self, request: RoutedRequest) -> IntArray:
        """Return the replicas that may serve a request, in ascending order.

        These are the ones that its adapter is placed on. If none of them accepts requests now, they are all
        that do: moving an adapter is better than failing a request. Raises CapacityError if none does.
        """
        accepts = self.load.accepts
        if self.plan is not None and request.adapter is not None:
            placed = np.array(self.plan.replicas[request.adapter], np.int64)
            placed = placed[accepts[placed]]
            if len(placed):
                return placed
        return self.accepting()

    def accepting(self) -> IntArray:
        """Return all replicas that accept requests now, in ascending order. Raises CapacityError if there are
        none."""
        found: IntArray = self.load.accepts.nonzero()[0]
        if not len(found):
            raise CapacityError("no replica of the fleet accepts requests now; wait until one is ready again")
        return found

    def with_room(self, request: RoutedRequest, candidates: IntArray) -> IntArray:
        """Return the candidates whose KV memory has room for the request; all of them if none has, since one
        of them has to queue it then."""
        found = candidates[self.load.has_room(request)[candidates]]
        return found if len(found) else candidates

    def load_s(self, request: RoutedRequest, candidates: IntArray) -> FloatArray:
        """Return the seconds until each candidate has the request's adapter on its device."""
        adapter = request.adapter
        if adapter is None:
            return np.zeros(len(candidates))
        copy_s = self.moves.from_host_s(adapter)
        seconds = np.full(self.load.num_replicas, copy_s + self.moves.from_elsewhere_s(adapter))
        for homes, home_s in ((self.tiers.on_host(adapter), copy_s), (self.tiers.on_device(adapter), 0.0)):
            if homes:
                seconds[list(homes)] = home_s
        return seconds[candidates]
