"""Rendezvous hashing with bounded loads, as in Dynamo: an adapter always prefers the same replicas.

Every (adapter, replica) pair has a pseudo-random weight. An adapter goes to the replica with the highest
weight, unless that has clearly more requests than the mean: then to the next. A replica that joins or leaves
moves only its own share of the adapters.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView

BOUND: Final = 1.25
"""Most requests of a replica, relative to the mean of all: hashing with bounded loads keeps each below it."""


class RendezvousRouter:
    def __init__(self, bound: float = BOUND) -> None:
        assert bound >= 1, "there must always be a replica below the bound"
        self._bound = bound
        self._turns = Turns()

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates, load = view.candidates(request), view.load
        num_requests = load.everything.num_requests[candidates]
        if request.adapter is None:
            return self._turns.pick(candidates, num_requests)
        most = math.ceil(self._bound * (int(num_requests.sum()) + 1) / len(candidates))
        weights = np.where(num_requests < most, pair_weights(request.adapter, candidates), -1.0)
        return int(candidates[weights.argmax()])


def pair_weights(adapter: int, replicas: IntArray) -> FloatArray:
    """Return weights in [0, 1) that depend only on the two numbers (splitmix64)."""
    seed = (adapter * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    mixed = replicas.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray(mixed >> np.uint64(11), np.float64) * 2.0**-53
