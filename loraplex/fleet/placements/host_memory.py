"""The constraint that every plan must satisfy: the adapters of a replica fit its host memory.

Policies balance load first. A plan that does not fit is repaired here with the fewest changes: copies beyond
the first are removed first, then adapters with the least load move. Only if that leaves an adapter without a
place are all of them packed again by size.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from loraplex.core.arrays import IntArray
from loraplex.core.errors import UserError
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan

_Weights = list[dict[int, float]]


def within_host_memory(plan: Plan, problem: PlacementProblem) -> Plan:
    """Return the plan itself if it fits the hosts, else one that does. Raises UserError if none is found."""
    if problem.host_bytes is None:
        return plan
    free_bytes = problem.host_bytes - plan.bytes_by_replica(problem.adapters, problem.num_replicas)
    if (free_bytes >= 0).all():
        return plan
    weights: _Weights = [
        dict(zip(replicas, shares, strict=True))
        for replicas, shares in zip(plan.replicas, plan.shares, strict=True)
    ]
    without_copy = _take_off(weights, free_bytes, problem)
    if _put_back(weights, without_copy, free_bytes, problem):
        return Plan.of_weights(weights)
    return Plan.of_homes(_packed_by_size(problem, problem.host_bytes))


def _take_off(weights: _Weights, free_bytes: IntArray, problem: PlacementProblem) -> list[int]:
    """Remove copies from replicas that are too full, and return the adapters that have none left."""
    sizes, demand = problem.adapters.num_bytes.tolist(), problem.demand.tolist()
    held: list[list[int]] = [[] for _ in free_bytes]
    for adapter, by_replica in enumerate(weights):
        for replica in by_replica:
            held[replica].append(adapter)
    without_copy: list[int] = []
    for replica in np.flatnonzero(free_bytes < 0).tolist():
        order = [(len(weights[a]) == 1, demand[a] * weights[a][replica], a) for a in held[replica]]
        for _, _, adapter in sorted(order):
            if free_bytes[replica] >= 0:
                break
            del weights[adapter][replica]
            free_bytes[replica] += sizes[adapter]
            if not weights[adapter]:
                without_copy.append(adapter)
    return without_copy


def _put_back(
    weights: _Weights, without_copy: list[int], free_bytes: IntArray, problem: PlacementProblem
) -> bool:
    """Place each of these adapters where most memory is free, largest first. Return False if they do not all
    fit."""
    roomiest = [(-free, replica) for replica, free in enumerate(free_bytes.tolist())]
    heapify(roomiest)
    sizes = problem.adapters.num_bytes
    for adapter in sorted(without_copy, key=lambda a: (-sizes[a], a)):
        negative_free, replica = roomiest[0]
        left_bytes = -negative_free - int(sizes[adapter])
        if left_bytes < 0:
            return False
        heapreplace(roomiest, (-left_bytes, replica))
        weights[adapter][replica] = 1.0
    return True


def _packed_by_size(problem: PlacementProblem, host_bytes: int) -> IntArray:
    """Return one replica for each adapter: largest first, each to where it leaves the least free."""
    sizes = problem.adapters.num_bytes
    free_bytes = np.full(problem.num_replicas, host_bytes, dtype=np.int64)
    homes = np.zeros(len(sizes), dtype=np.int64)
    no_room = np.iinfo(np.int64).max
    for adapter in np.argsort(-sizes, kind="stable"):
        left_bytes = free_bytes - sizes[adapter]
        home = int(np.where(left_bytes >= 0, left_bytes, no_room).argmin())
        if left_bytes[home] < 0:
            raise UserError(
                f"adapter {adapter} takes {sizes[adapter]:,} bytes, {-left_bytes.max():,} more than any "
                f"replica has left beside larger ones: {len(sizes)} adapters, though not too large in sum, "
                f"were not packed into {host_bytes:,} bytes of host memory on each of {problem.num_replicas} "
                "replicas; give more --replicas, or a profile with more host memory"
            )
        free_bytes[home] -= sizes[adapter]
        homes[adapter] = home
    return homes
