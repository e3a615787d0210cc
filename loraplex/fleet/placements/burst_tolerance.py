"""dLoRA's proactive placement: more copies for the adapters that tolerate a burst least.

The burst tolerance of an adapter is its capacity over its load. Its capacity is the device memory left for
requests on the replicas that hold it, so another copy raises the adapter's own tolerance and lowers that of
all others on its replica. Copies are added for the adapter with the lowest tolerance, until the lowest
tolerance would fall.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from typing import Final

import numpy as np

from loraplex.core.arrays import IntArray
from loraplex.core.errors import UserError
from loraplex.fleet.placements.host_memory import within_host_memory
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan

_NO_ROOM: Final = -1.0


class BurstTolerancePlacement:
    """Raises the lowest burst tolerance of all adapters, greedily."""

    def place(self, problem: PlacementProblem) -> Plan:
        if problem.device_bytes is None:
            raise UserError(
                "burst tolerance is about memory that adapters share with the KV cache, which they do not "
                "here; choose another placement"
            )
        first = within_host_memory(Plan.of_homes(_first_copies(problem)), problem)
        if not problem.demand.any():
            return first
        holders = [list(replicas) for replicas in first.replicas]
        tolerances = _Tolerances(holders, first, problem, problem.device_bytes)
        lowest, adapter = tolerances.lowest()
        while (replica := tolerances.roomiest_for(adapter)) is not None:
            tolerances.copy(adapter, replica)
            lowest_after, next_adapter = tolerances.lowest()
            if lowest_after < lowest:
                break
            holders[adapter].append(replica)
            lowest, adapter = lowest_after, next_adapter
        return Plan.with_equal_shares(holders)


def _first_copies(problem: PlacementProblem) -> IntArray:
    """Return a replica for each adapter: highest demand first, each where most memory is left."""
    homes = np.empty(len(problem.adapters), dtype=np.int64)
    emptiest = [(0, replica) for replica in range(problem.num_replicas)]
    heapify(emptiest)
    sizes = problem.adapters.num_bytes.tolist()
    for adapter in np.argsort(-problem.demand, kind="stable").tolist():
        taken_bytes, replica = emptiest[0]
        heapreplace(emptiest, (taken_bytes + sizes[adapter], replica))
        homes[adapter] = replica
    return homes


class _Tolerances:
    """The burst tolerance of every adapter with load, while copies are added.

    Adapters whose only copy is on one replica have the same capacity, so the one with the highest load has
    the lowest tolerance: each replica keeps these in a queue, by load. Only adapters with several copies, of
    which there are few, are examined one by one."""

    def __init__(
        self, holders: list[list[int]], first: Plan, problem: PlacementProblem, device_bytes: int
    ) -> None:
        self._holders = holders
        self._loads = problem.demand.tolist()
        self._sizes = problem.adapters.num_bytes.tolist()
        taken_bytes = first.bytes_by_replica(problem.adapters, problem.num_replicas)
        self._left_bytes = np.maximum(device_bytes - taken_bytes, 0).astype(np.float64)
        limit_bytes = device_bytes if problem.host_bytes is None else min(device_bytes, problem.host_bytes)
        self._room_bytes = limit_bytes - taken_bytes
        loaded = np.flatnonzero(problem.demand > 0)
        self._queues: list[list[int]] = [[] for _ in range(problem.num_replicas)]
        for adapter in loaded[np.argsort(problem.demand[loaded], kind="stable")].tolist():
            self._queues[holders[adapter][0]].append(adapter)
        self._queue_loads = np.array([self._queue_load(replica) for replica in range(problem.num_replicas)])
        # Adapters with several copies, as rows in the order in which they got their second copy.
        self._row_of: dict[int, int] = {}
        self._copied: list[int] = []
        self._holds = np.zeros((problem.num_replicas, len(loaded)), dtype=bool)
        self._capacities = np.zeros(len(loaded))
        self._row_loads = np.ones(len(loaded))

    def lowest(self) -> tuple[float, int]:
        """Return the lowest tolerance, and the adapter that has it."""
        # A replica with an empty queue has a load of zero here, and no tolerance to consider.
        with np.errstate(divide="ignore", invalid="ignore"):
            of_queues = np.where(self._queue_loads > 0, self._left_bytes / self._queue_loads, np.inf)
        replica = int(of_queues.argmin())
        tolerance = float(of_queues[replica])
        num_rows = len(self._copied)
        if num_rows:
            of_rows = self._capacities[:num_rows] / self._row_loads[:num_rows]
            row = int(of_rows.argmin())
            if of_rows[row] < tolerance:
                return float(of_rows[row]), self._copied[row]
        return tolerance, self._queues[replica][-1]

    def roomiest_for(self, adapter: int) -> int | None:
        """Return the replica without this adapter that has most memory left; None if it fits nowhere."""
        candidates = np.where(self._room_bytes < self._sizes[adapter], _NO_ROOM, self._left_bytes)
        candidates[self._holders[adapter]] = _NO_ROOM
        replica = int(candidates.argmax())
        return None if candidates[replica] == _NO_ROOM else replica

    def copy(self, adapter: int, replica: int) -> None:
        """Account for one more copy: others on the replica lose capacity, the adapter gains what is left
        there."""
        row, size = self._row(adapter), self._sizes[adapter]
        num_rows = len(self._copied)
        self._capacities[:num_rows] -= size * self._holds[replica, :num_rows]
        self._left_bytes[replica] -= size
        self._room_bytes[replica] -= size
        self._capacities[row] += self._left_bytes[replica]
        self._holds[replica, row] = True

    def _row(self, adapter: int) -> int:
        """Return the adapter's row; an adapter with a single copy so far is moved from its queue to a new
        row."""
        row = self._row_of.get(adapter)
        if row is None:
            (home,) = self._holders[adapter]
            removed = self._queues[home].pop()
            assert removed == adapter, "only the most asked for of a replica can be the least tolerant"
            self._queue_loads[home] = self._queue_load(home)
            row = self._row_of[adapter] = len(self._copied)
            self._copied.append(adapter)
            self._holds[home, row] = True
            self._capacities[row] = self._left_bytes[home]
            self._row_loads[row] = self._loads[adapter]
        return row

    def _queue_load(self, replica: int) -> float:
        queue = self._queues[replica]
        return self._loads[queue[-1]] if queue else 0.0
