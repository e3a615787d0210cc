"""Our own router: it picks the replica where a request costs the fleet the least time per token, or a
similarly cheap one that has the adapter.

The cost of a replica is what its requests lose by a new one, as in `rank_aware`, plus what the new one takes
there itself: a decode step with it and, spread over its answer, the prompts before it, the wait for a place
in the batch, and the load of its adapter. A replica that would break the SLO is chosen only if all would, and
one that would have to queue the request, because its KV memory is full, only if all would.

Of those that cost little more than the cheapest, one that has the adapter on its device is preferred, then
one that has it in host memory, then one that the plan names for it; but none whose steps are near the SLO. If
engines have slots, those that the plan names come first, because each slot is planned for an adapter. So a
plan says where adapters are placed, and a request goes elsewhere only if that pays off: adapters are rarely
loaded, and a burst can still use all replicas.

Prompts are spread in time, because each delays all requests that decode beside it: the more prompts wait at a
replica that has the adapter, the less it may cost; except if engines have slots, where going elsewhere may
evict another adapter. Of the replicas that are about as cheap as the cheapest, one with the fewest waiting
prompts is chosen, then the one picked longest ago.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.added_costs import AddedCosts
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView

TOLERANCE: Final = 0.35
"""Largest extra cost of a replica that has the adapter, relative to the cheapest replica."""
HEADROOM: Final = 0.95
"""Share of the SLO that a decode step may take on a replica that is preferred for its adapter."""
SIMILAR: Final = 0.1
"""Largest extra cost at which a replica counts as equally cheap, relative to the cheapest one."""
CROWDED: Final = 0.2
"""Relative cost added to a replica that has the adapter for each prompt that waits there, beyond the fewest
waiting at a replica as cheap as the cheapest."""


class AutoRouter:
    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self._tolerance = tolerance
        self._added = AddedCosts()
        self._turns = Turns()

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates = view.with_room(request, view.accepting())
        if len(candidates) == 1:
            return int(candidates[0])
        cost_s, decode_s = self._costs(request, view, candidates)
        cheapest_s = float(cost_s[cost_s.argmin()])
        most_s = cheapest_s * (1 + self._tolerance)
        num_waiting = view.load.waiting.num_requests
        longest_s = math.inf if view.slo_s is None else HEADROOM * view.slo_s
        similar: IntArray = (cost_s <= cheapest_s * (1 + SIMILAR)).nonzero()[0]
        waiting_there = num_waiting[similar]
        fewest = waiting_there[waiting_there.argmin()]
        crowded = CROWDED if view.load.num_slots is None else 0.0
        for homes in _homes(request, view):
            # Homes are few, so they are checked one by one instead of all replicas for each kind of home.
            near = sorted(
                home
                for home in homes
                if cost_s[home] * (1 + crowded * max(num_waiting[home] - fewest, 0)) <= most_s
                and decode_s[home] <= longest_s
            )
            if near:
                return self._turns.pick(np.array(near), num_waiting[near], cost_s[near])
        return self._turns.pick(similar, waiting_there)

    def _costs(
        self, request: RoutedRequest, view: FleetView, candidates: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the seconds per token that the fleet loses by each replica, infinite for those that are no
        candidates or would break the SLO while others would not; and the seconds of a decode step there with
        the request."""
        load, mean_tokens = view.load, view.load.answers.mean_tokens
        own_tokens = load.output_left(request)
        # Computed for all replicas: selecting the candidates from the columns would take longer.
        added = self._added.of(request, view, load.replicas)
        num_requests, decode_s = added.num_requests, added.decode_s
        if (num_requests >= load.max_running).any():
            too_many = np.maximum(num_requests + 1 - load.max_running, 0)
            decode_s = decode_s * (1 + too_many / load.max_running)
        own_s = decode_s + (added.queue_s + view.load_s(request, load.replicas)) / own_tokens
        cost_s: FloatArray = own_s + num_requests * (added.prefill_s / mean_tokens + added.decode_more_s)
        if view.slo_s is not None:
            within = candidates[own_s[candidates] <= view.slo_s]
            candidates = within if len(within) else candidates
        if len(candidates) == load.num_replicas:
            return cost_s, decode_s
        allowed_s = np.full(load.num_replicas, math.inf)
        allowed_s[candidates] = cost_s[candidates]
        return allowed_s, decode_s


def _homes(request: RoutedRequest, view: FleetView) -> Iterator[Collection[int]]:
    """Yield the replicas that have the adapter or should have it, by preference."""
    adapter = request.adapter
    if adapter is None:
        return
    on_device = view.tiers.on_device(adapter)
    if view.plan is not None and view.load.num_slots is not None:
        yield [home for home in view.plan.replicas[adapter] if home in on_device]
    yield on_device
    yield view.tiers.on_host(adapter)
    if view.plan is not None:
        yield view.plan.replicas[adapter]
