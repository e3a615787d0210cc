"""LoRAServe's placement: few ranks on each replica, and the same utilisation on all of them.

It has six steps, one function each: utilisation by rank, replicas for each rank, packing of each rank onto
its replicas, leftovers, the numbering that moves the least, routing shares. docs/decisions.md says what the
paper leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.fleet.placements.host_memory import within_host_memory
from loraplex.fleet.placements.least_moves import least_moves
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.placements.rank_bins import RankBins
from loraplex.fleet.placements.utilisation import operating_point_of_each
from loraplex.fleet.plan import Plan

_Leftover = tuple[int, float]
"""An adapter, and its tokens/s that no bin of its rank had room for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAServePlacement:
    """The six steps of the LoRAServe paper."""

    operating_points: Mapping[int, float]
    """The most tokens/s that one replica sustains with adapters of a single rank, by rank."""
    padded: bool = True
    """True if kernels pad to the largest rank in a batch, so that the largest rank on a replica sets its
    pace."""

    def place(self, problem: PlacementProblem) -> Plan:
        demand = _counted_demand(problem)
        used_by_rank = utilisation_by_rank(problem, demand, self.operating_points)
        bins = RankBins(
            num_bins=problem.num_replicas,
            num_adapters=len(problem.adapters),
            operating_points=self.operating_points,
            target=sum(used_by_rank.values()) / problem.num_replicas,
            padded=self.padded,
        )
        budgets = replicas_by_rank(used_by_rank, problem.num_replicas)
        leftovers = pack_ranks(bins, budgets, problem.adapters.ranks, demand)
        place_leftovers(bins, leftovers, problem.adapters.ranks)
        # Step 5: copy as few bytes as possible.
        replica_of_bin = least_moves(bins.tokens_per_s, problem.adapters.num_bytes, problem)
        plan = routing_shares(bins, replica_of_bin, problem)
        return within_host_memory(plan, problem)


def _counted_demand(problem: PlacementProblem) -> FloatArray:
    """Return the demand, or equal demand for all adapters if nothing is known about them."""
    if problem.previous is None and not problem.demand.any():
        return np.ones_like(problem.demand)
    return problem.demand


def utilisation_by_rank(
    problem: PlacementProblem, demand: FloatArray, operating_points: Mapping[int, float]
) -> dict[int, float]:
    """Return how many replicas each rank would keep fully busy, by ascending rank (step 1)."""
    used = demand / operating_point_of_each(problem.adapters, operating_points)
    ranks, places = np.unique(problem.adapters.ranks, return_inverse=True)
    totals = np.bincount(places.ravel(), weights=used, minlength=len(ranks))
    return dict(zip(ranks.tolist(), totals.tolist(), strict=True))


def replicas_by_rank(used_by_rank: Mapping[int, float], num_replicas: int) -> dict[int, int]:
    """Return how many replicas each rank gets for itself, in proportion to its utilisation (step 2).

    Numbers are rounded by largest remainder, so that all replicas are assigned; of equal remainders the
    higher rank's wins, because leftovers of lower ranks do not slow it down. Without any utilisation nothing
    is assigned."""
    total = sum(used_by_rank.values())
    if total <= 0:
        return dict.fromkeys(used_by_rank, 0)
    quotas = {rank: used * num_replicas / total for rank, used in used_by_rank.items()}
    budgets = {rank: int(quota) for rank, quota in quotas.items()}
    by_remainder = sorted(
        quotas, key=lambda rank: (round(quotas[rank] - budgets[rank], 9), rank), reverse=True
    )
    for rank in by_remainder[: num_replicas - sum(budgets.values())]:
        budgets[rank] += 1
    return budgets


def pack_ranks(
    bins: RankBins, budgets: Mapping[int, int], ranks: IntArray, demand: FloatArray
) -> list[_Leftover]:
    """Fill the bins of each rank with its adapters, and return what did not fit (step 3).

    The adapter with the largest demand comes first, and goes to the least used bin; what exceeds the bin's
    room goes to the next. Adapters without demand are skipped."""
    leftovers: list[_Leftover] = []
    first_bin = 0
    for rank, budget in budgets.items():
        least_used = [(0.0, index) for index in range(first_bin, first_bin + budget)]
        first_bin += budget
        of_rank = np.flatnonzero((ranks == rank) & (demand > 0))
        of_rank = of_rank[np.argsort(-demand[of_rank], kind="stable")]
        for adapter, left in zip(of_rank.tolist(), demand[of_rank].tolist(), strict=True):
            while left > 0 and least_used:
                index = least_used[0][1]
                left = bins.put_what_fits(index, adapter, rank, left)
                if left > 0:
                    heappop(least_used)
                else:
                    heapreplace(least_used, (bins.used[index], index))
            if left > 0:
                leftovers.append((adapter, left))
    return leftovers


def place_leftovers(bins: RankBins, leftovers: list[_Leftover], ranks: IntArray) -> None:
    """Put the leftovers into bins that have room, highest rank first (step 4).

    The bin with the highest ranks is the first choice, because lower ranks do not slow it down, and among
    such bins the least used one. A rank above that of every bin with room goes to the least used bin, which
    it slows down. If no bin has room for it, the least used one takes it."""
    queue = [
        (-rank, used, index) for index, (rank, used) in enumerate(zip(bins.max_ranks, bins.used, strict=True))
    ]
    heapify(queue)
    # Bins only fill up, so a rank for which none had room need not be tried again.
    full_for: int | None = None
    for adapter, leftover in sorted(leftovers, key=lambda each: (-int(ranks[each[0]]), each[0])):
        rank, left = int(ranks[adapter]), leftover
        while left > 0 and queue:
            if -queue[0][0] < rank and (rank == full_for or not _bring_to_top(queue, bins, rank)):
                full_for = rank
                break
            index = queue[0][2]
            left = bins.put_what_fits(index, adapter, rank, left)
            if left > 0:
                heappop(queue)
            else:
                heapreplace(queue, (-bins.max_ranks[index], bins.used[index], index))
        if left > 0:
            bins.put(bins.least_used(rank), adapter, rank, left)


def _bring_to_top(queue: list[tuple[int, float, int]], bins: RankBins, rank: int) -> bool:
    """Make the bin least used with this rank the first choice if it has room; return whether."""
    place = min(range(len(queue)), key=lambda each: (bins.used_with(queue[each][2], rank), queue[each][2]))
    index = queue[place][2]
    if not bins.room(index, rank):
        return False
    queue[place] = (-rank, bins.used_with(index, rank), index)
    heapify(queue)
    return True


def routing_shares(bins: RankBins, replica_of_bin: list[int], problem: PlacementProblem) -> Plan:
    """Return the plan; shares are in proportion to the tokens/s that each bin has of an adapter (step 6)."""
    weights = [
        {replica_of_bin[index]: tokens_per_s for index, tokens_per_s in by_bin.items()}
        for by_bin in bins.tokens_per_s
    ]
    max_ranks = [0] * problem.num_replicas
    for index, replica in enumerate(replica_of_bin):
        max_ranks[replica] = bins.max_ranks[index]
    place_idle(weights, max_ranks, problem)
    return Plan.of_weights(weights)


def place_idle(weights: list[dict[int, float]], max_ranks: list[int], problem: PlacementProblem) -> None:
    """Give each adapter without demand a home: where it was, or else the replica with the fewest bytes.

    Replicas whose ranks are at least as high are preferred: there it does no harm if it gets requests after
    all."""
    sizes = problem.adapters.num_bytes.tolist()
    ranks = problem.adapters.ranks.tolist()
    taken_bytes = [0] * problem.num_replicas
    for by_replica, size in zip(weights, sizes, strict=True):
        for replica in by_replica:
            taken_bytes[replica] += size
    before = () if problem.previous is None else problem.previous.replicas
    highest = max(max_ranks)
    unplaced: list[int] = []
    for adapter, by_replica in enumerate(weights):
        if by_replica:
            continue
        held = before[adapter] if adapter < len(before) else ()
        fitting = [each for each in held if max_ranks[each] >= min(ranks[adapter], highest)]
        if fitting:
            by_replica[fitting[0]] = 1.0
            taken_bytes[fitting[0]] += sizes[adapter]
        else:
            unplaced.append(adapter)
    _place_by_size(unplaced, weights, max_ranks, taken_bytes, problem)


def _place_by_size(
    unplaced: list[int],
    weights: list[dict[int, float]],
    max_ranks: list[int],
    taken_bytes: list[int],
    problem: PlacementProblem,
) -> None:
    sizes, ranks = problem.adapters.num_bytes.tolist(), problem.adapters.ranks.tolist()
    highest = max(max_ranks)
    for rank in sorted({ranks[adapter] for adapter in unplaced}):
        lightest = [
            (taken_bytes[replica], replica)
            for replica, largest in enumerate(max_ranks)
            if largest >= min(rank, highest)
        ]
        heapify(lightest)
        for adapter in unplaced:
            if ranks[adapter] == rank:
                replica = lightest[0][1]
                weights[adapter][replica] = 1.0
                taken_bytes[replica] += sizes[adapter]
                heapreplace(lightest, (taken_bytes[replica], replica))
