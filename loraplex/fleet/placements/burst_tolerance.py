"""dLoRA's proactive placement: more copies for the adapters that could take a burst least.

The burst tolerance of an adapter is its capacity over its load. Its capacity is the device memory that is
left for requests on the replicas that hold it, so that a copy more raises the adapter's own tolerance and
lowers that of all others on its replica. Copies are made for the adapter with the lowest tolerance, until the
lowest would fall.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from loraplex.core.errors import UserError
from loraplex.fleet.arrays import FloatArray, IntArray
from loraplex.fleet.placements.host_memory import within_host_memory
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan


class BurstTolerancePlacement:
    """Raises the lowest burst tolerance of all adapters, greedily."""

    def place(self, problem: PlacementProblem) -> Plan:
        if problem.device_bytes is None:
            raise UserError(
                "burst tolerance is about device memory that is left for requests; say how much a replica "
                "has for adapters and KV cache (device_bytes)"
            )
        first = within_host_memory(Plan.of_homes(_first_copies(problem)), problem)
        holders = [list(replicas) for replicas in first.replicas]
        taken_bytes = first.bytes_by_replica(problem.adapters, problem.num_replicas)
        _copy_the_least_tolerant(holders, taken_bytes, problem, problem.device_bytes)
        return Plan.with_equal_shares(holders)


def _first_copies(problem: PlacementProblem) -> IntArray:
    """Return a replica for each adapter: most asked for first, each where most memory is left."""
    homes = np.empty(len(problem.adapters), dtype=np.int64)
    emptiest = [(0, replica) for replica in range(problem.num_replicas)]
    heapify(emptiest)
    sizes = problem.adapters.num_bytes.tolist()
    for adapter in np.argsort(-problem.demand, kind="stable").tolist():
        taken_bytes, replica = emptiest[0]
        heapreplace(emptiest, (taken_bytes + sizes[adapter], replica))
        homes[adapter] = replica
    return homes


def _copy_the_least_tolerant(
    holders: list[list[int]], taken_bytes: IntArray, problem: PlacementProblem, device_bytes: int
) -> None:
    """Add copies to `holders` until the lowest tolerance would fall, or there is no room for the next copy.

    Adapters without load tolerate any burst, and are left out."""
    loaded = np.flatnonzero(problem.demand > 0)
    if not loaded.size:
        return
    holds = np.zeros((problem.num_replicas, len(loaded)), dtype=bool)
    for row, adapter in enumerate(loaded.tolist()):
        holds[holders[adapter], row] = True
    load = problem.demand[loaded]
    left_bytes = np.maximum(device_bytes - taken_bytes, 0).astype(np.float64)
    both_bytes = device_bytes if problem.host_bytes is None else min(device_bytes, problem.host_bytes)
    room_bytes = both_bytes - taken_bytes
    capacity: FloatArray = left_bytes @ holds
    tolerance = capacity / load
    while True:
        worst = int(tolerance.argmin())
        adapter = int(loaded[worst])
        size = int(problem.adapters.num_bytes[adapter])
        candidates = np.where(holds[:, worst] | (room_bytes < size), -1.0, left_bytes)
        replica = int(candidates.argmax())
        if candidates[replica] < 0:
            return
        capacity_after = capacity - size * holds[replica]
        capacity_after[worst] += left_bytes[replica] - size
        tolerance_after = capacity_after / load
        if tolerance_after.min() < tolerance[worst]:
            return
        capacity, tolerance = capacity_after, tolerance_after
        left_bytes[replica] -= size
        room_bytes[replica] -= size
        holds[replica, worst] = True
        holders[adapter].append(replica)
