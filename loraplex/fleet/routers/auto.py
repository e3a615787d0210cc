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

import math
from collections.abc import Collection, Iterator
from typing import Final

import numpy as np

from loraplex.fleet.arrays import FloatArray, IntArray
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
        cost_s = self._costs(request, view, candidates)
        most_s = float(cost_s[cost_s.argmin()]) * (1 + self._stays)
        # Homes are few: they are looked at one by one, and not all replicas for each kind of home.
        cost_of = dict(zip(candidates.tolist(), cost_s.tolist(), strict=True))
        for homes in _homes(request, view):
            near = sorted(home for home in homes if cost_of.get(home, math.inf) <= most_s)
            if near:
                return self._turns.pick(np.array(near), np.array([cost_of[home] for home in near]))
        return self._turns.pick(candidates, cost_s)

    def _costs(self, request: RoutedRequest, view: FleetView, candidates: IntArray) -> FloatArray:
        """Seconds per token that the fleet loses by each candidate; infinite where it would break the SLO,
        unless all would."""
        load, mean_tokens = view.load, view.load.answers.mean_tokens
        own_tokens = load.output_left(request)
        added = self._added.by(request, view, candidates)
        num_requests, decode_s = added.num_requests, added.decode_s
        too_many = num_requests + 1 - load.max_running[candidates]
        if too_many[too_many.argmax()] > 0:
            decode_s = decode_s * (1 + np.maximum(too_many, 0) / load.max_running[candidates])
        own_s = decode_s + (added.queue_s + view.load_s(request, candidates)) / own_tokens
        cost_s = own_s + num_requests * (added.prefill_s / mean_tokens + added.decode_more_s)
        if view.slo_s is not None:
            breaks = own_s > view.slo_s
            if breaks.any() and not breaks.all():
                cost_s[breaks] = math.inf
        return np.asarray(cost_s, np.float64)


def _homes(request: RoutedRequest, view: FleetView) -> Iterator[Collection[int]]:
    """Yield the replicas that have the adapter or are to have it, the nearest to its use first."""
    adapter = request.adapter
    if adapter is None:
        return
    yield view.tiers.on_device(adapter)
    yield view.tiers.on_host(adapter)
    if view.plan is not None:
        yield view.plan.replicas[adapter]
