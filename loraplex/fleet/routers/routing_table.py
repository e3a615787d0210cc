"""LoRAServe's policy: each adapter's requests are divided over its replicas by the shares of the placement.

`random`: each request is sent with these probabilities. `stride`: after any number of requests, each replica
has had its share of them to within less than one request. Stride scheduling alone does not guarantee that: a
replica with a large share would get a run of requests before those with small shares get their first. So a
replica that is ahead of its share waits, as in the quota method of Balinski and Young.

While a replica is down, the adapter's other replicas take over its share, in proportion to their own. Counts
start over when the replicas or shares of an adapter change: a replica that comes back is not sent everything
that it has missed.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView

_ROUNDING: Final = 1e-9
"""Tolerance in requests: a replica that has exactly its share is not behind, however the share was
rounded."""


class Division(StrEnum):
    """The ways to divide requests by shares."""

    RANDOM = "random"
    STRIDE = "stride"


class _Counts(NamedTuple):
    """The number of an adapter's requests sent to each of its replicas since the replicas and shares last
    changed."""

    replicas: tuple[int, ...]
    shares: tuple[float, ...]
    sent: FloatArray


class RoutingTableRouter:
    def __init__(self, division: Division = Division.STRIDE, seed: int = 0) -> None:
        self._division = division
        self._random = random.Random(seed)
        self._turns = Turns()
        self._counts: dict[int, _Counts] = {}  # by adapter

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        """Return a replica by the adapter's shares. Without a plan, for the base model, and if all of an
        adapter's replicas are down, all accepting replicas share evenly."""
        candidates, plan, adapter = view.candidates(request), view.plan, request.adapter
        if plan is None or adapter is None:
            return self._among_equals(candidates)
        left: tuple[int, ...] = tuple(candidates.tolist())
        shares = plan.shares[adapter]
        if left != plan.replicas[adapter]:
            planned = dict(zip(plan.replicas[adapter], shares, strict=True))
            if left[0] not in planned:
                return self._among_equals(candidates)
            shares = tuple(planned[replica] for replica in left)
        return int(candidates[self._place(adapter, left, shares)])

    def _among_equals(self, candidates: IntArray) -> int:
        if self._division is Division.RANDOM:
            return int(candidates[self._random.randrange(len(candidates))])
        return self._turns.pick(candidates)

    def _place(self, adapter: int, replicas: tuple[int, ...], shares: tuple[float, ...]) -> int:
        """Return the position of the replica that is next. `shares`: need not sum to one."""
        if len(shares) == 1:
            return 0
        if self._division is Division.RANDOM:
            return self._random.choices(range(len(shares)), shares)[0]
        counts = self._counts.get(adapter)
        if counts is None or counts.replicas != replicas or counts.shares != shares:
            counts = self._counts[adapter] = _Counts(replicas, shares, np.zeros(len(shares)))
        sent, due = counts.sent, np.array(shares) / sum(shares)
        is_behind = sent < due * (sent.sum() + 1) - _ROUNDING
        place = int(np.where(is_behind, (sent + 1) / due, np.inf).argmin())
        sent[place] += 1
        return place
