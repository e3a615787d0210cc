"""Compute how busy a plan makes each replica, from the tokens/s that a replica sustains of each rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.core.errors import UserError
from loraplex.core.words import plural
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan


def operating_point_of_each(adapters: AdapterSizes, operating_points: Mapping[int, float]) -> FloatArray:
    """Return the operating point of each adapter's rank. Raises UserError if one is missing or invalid."""
    points = np.empty(len(adapters))
    for rank in np.unique(adapters.ranks).tolist():
        of_rank = adapters.ranks == rank
        point = operating_points.get(rank)
        if point is None:
            known = ", ".join(map(str, sorted(operating_points))) or "none"
            num = int(of_rank.sum())
            raise UserError(
                f"there is no operating point for rank {rank}, which {num} {plural('adapter', num)} "
                f"{'has' if num == 1 else 'have'}; ranks with one: {known}"
            )
        if not 0 < point < np.inf:
            raise UserError(f"the operating point of rank {rank} is {point:g} tokens/s; it must be above 0")
        points[of_rank] = point
    return points


def utilisation_by_replica(
    plan: Plan, problem: PlacementProblem, operating_points: Mapping[int, float] | None, *, padded: bool
) -> FloatArray:
    """Return the expected demand on each replica, relative to what it sustains.

    `padded`: kernels pad to the largest rank in a batch, so a replica sustains no more than the operating
    point of the largest rank with demand there. Without operating points all tokens count the same, and the
    result is in tokens/s."""
    copies = plan.copies()
    num_replicas = problem.num_replicas
    tokens_per_s = problem.demand[copies.adapters] * copies.shares
    if operating_points is None:
        return _sums(copies.replicas, tokens_per_s, num_replicas)
    points = operating_point_of_each(problem.adapters, operating_points)
    if not padded:
        return _sums(copies.replicas, tokens_per_s / points[copies.adapters], num_replicas)
    largest_ranks = np.zeros(num_replicas, dtype=np.int64)
    asked_for = tokens_per_s > 0
    np.maximum.at(
        largest_ranks, copies.replicas[asked_for], problem.adapters.ranks[copies.adapters[asked_for]]
    )
    sustained = np.array([operating_points[rank] if rank else np.inf for rank in largest_ranks.tolist()])
    used: FloatArray = _sums(copies.replicas, tokens_per_s, num_replicas) / sustained
    return used


def _sums(replicas: IntArray, values: FloatArray, num_replicas: int) -> FloatArray:
    return np.bincount(replicas, weights=values, minlength=num_replicas).astype(np.float64)
