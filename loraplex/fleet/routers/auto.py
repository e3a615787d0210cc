"""Ours: the replica where a request costs the fleet the least time per token, near its adapter.

The cost of a replica is what its requests lose by a new one, as in `rank_aware`, and what the new one takes
there itself: a decode step with it, and over its whole answer the prompts before it, a place in the batch and
its adapter. Replicas that differ by little are as good as each other, as predictions are no better than that.
So among those within a few per cent of the cheapest, one that has the adapter on its device is taken, then
one that has it in host memory, then the one that the adapter prefers by rendezvous hashing: adapters stay
where they are as long as that costs nothing, and one that comes for the first time has always the same home.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loraplex.fleet.arrays import BoolArray, FloatArray, IntArray
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.added_costs import AddedCosts
from loraplex.fleet.routers.rendezvous import pair_weights
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView

TOLERANCE: Final = 0.05
"""How much more than the cheapest replica another may cost to be as good."""


class AutoRouter:
    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self._tolerance = tolerance
        self._added = AddedCosts()
        self._turns = Turns()

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates = view.candidates(request)
        if len(candidates) == 1:
            return int(candidates[0])
        cost_s, breaks = self._costs(request, view, candidates)
        if not breaks.all():
            cost_s = np.where(breaks, np.inf, cost_s)
        near = np.flatnonzero(cost_s <= cost_s.min() * (1 + self._tolerance))
        return self._nearest(request, view, candidates[near], cost_s[near])

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

    def _nearest(
        self, request: RoutedRequest, view: FleetView, candidates: IntArray, cost_s: FloatArray
    ) -> int:
        adapter = request.adapter
        if adapter is None:
            return self._turns.pick(candidates, cost_s)
        for holders in (view.tiers.on_device(adapter), view.tiers.on_host(adapter)):
            if holders:
                has = np.fromiter(
                    (each in holders for each in candidates.tolist()), np.bool_, len(candidates)
                )
                if has.any():
                    return self._turns.pick(candidates[has], cost_s[has])
        return int(candidates[pair_weights(adapter, candidates).argmax()])
