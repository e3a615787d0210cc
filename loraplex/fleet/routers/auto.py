"""Ours: the replica where a request costs the fleet the least time per token, or one near it that has the
adapter.

The cost of a replica is what its requests lose by a new one, as in `rank_aware`, and what the new one takes
there itself: a decode step with it, and over its whole answer the prompts before it, a place in the batch and
its adapter. A replica that would break the SLO is chosen only if all would.

Of those that cost little more than the cheapest, one that has the adapter on its device is taken, then one
that has it in host memory, then one that the plan names for it. So a plan says where adapters live, and a
request leaves home only if that pays: adapters are rarely loaded, and a burst still has all replicas to go
to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import numpy as np

from loraplex.fleet.arrays import BoolArray, FloatArray, IntArray
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.added_costs import AddedCosts
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView

STAYS: Final = 0.25
"""How much more than the cheapest replica one that has the adapter may cost."""


class AutoRouter:
    def __init__(self, stays: float = STAYS) -> None:
        self._stays = stays
        self._added = AddedCosts()
        self._turns = Turns()

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates = view.everyone()
        if len(candidates) == 1:
            return int(candidates[0])
        cost_s, breaks = self._costs(request, view, candidates)
        if not breaks.all():
            cost_s = np.where(breaks, np.inf, cost_s)
        near = cost_s <= cost_s.min() * (1 + self._stays)
        for homes in _homes(request, view):
            at_home = np.zeros(view.load.num_replicas, np.bool_)
            at_home[list(homes)] = True
            found = near & at_home[candidates]
            if found.any():
                return self._turns.pick(candidates[found], cost_s[found])
        return self._turns.pick(candidates, cost_s)

    def _costs(
        self, request: RoutedRequest, view: FleetView, candidates: IntArray
    ) -> tuple[FloatArray, BoolArray]:
        """Seconds per token that the fleet loses by each candidate, and which of them would break the SLO."""
        load, mean_tokens = view.load, view.load.answers.mean_tokens
        added = self._added.by(request, view, candidates)
        max_running = load.max_running[candidates]
        too_many = np.maximum(added.num_requests + 1 - max_running, 0)
        waits_s = added.queue_s + view.load_s(request, candidates)
        own_s = added.decode_s * (1 + too_many / max_running) + waits_s / mean_tokens
        others_s = added.num_requests * (added.prefill_s / mean_tokens + added.decode_more_s)
        breaks = np.zeros(len(candidates), np.bool_) if view.slo_s is None else own_s > view.slo_s
        return own_s + others_s, breaks


def _homes(request: RoutedRequest, view: FleetView) -> Iterator[Collection[int]]:
    """Yield the replicas that have the adapter or are to have it, the nearest to its use first."""
    adapter = request.adapter
    if adapter is None:
        return
    yield view.tiers.on_device(adapter)
    yield view.tiers.on_host(adapter)
    if view.plan is not None:
        yield view.plan.replicas[adapter]
