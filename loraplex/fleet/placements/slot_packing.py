"""Our own placement for engines with slots: adapters with the highest demand keep their slots, the others
share those of few replicas.

An engine with slots (vLLM) has to load an adapter that is in none of them, and evicts the least recently used
one. If all replicas serve equally many adapters, each keeps loading. So as many replicas as possible serve no
more adapters than they have slots, those with the highest demand, and load each of them once; the other
replicas serve the rest. Their number is limited by load: no replica should have much more than its share. An
adapter that alone has more than that is served by several.

Each replica gets the group that it had most of before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.fleet.placements.host_memory import within_host_memory
from loraplex.fleet.placements.least_moves import least_moves
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan

_LEAST_DEMAND: Final = 1e-3
"""Smallest demand that an adapter counts for, relative to the mean."""
_MOST_OVER_FAIR: Final = 1.2
"""Most load of a replica, relative to an equal share."""
_BISECTIONS: Final = 50


class _Piece(NamedTuple):
    """An adapter, or a part of its demand."""

    amount: float
    adapter: int


class SlotPackingPlacement:
    def place(self, problem: PlacementProblem) -> Plan:
        assert problem.num_slots is not None
        if not len(problem.adapters):
            return Plan(replicas=(), shares=())
        demand = np.maximum(problem.demand, _LEAST_DEMAND * (problem.demand.mean() or 1.0))
        groups = _groups(_pieces(demand, problem.num_replicas), problem.num_replicas, problem.num_slots)
        amounts: list[dict[int, float]] = [{} for _ in demand]
        for number, group in enumerate(groups):
            for amount, adapter in group:
                amounts[adapter][number] = amounts[adapter].get(number, 0.0) + amount
        replica_of = least_moves(amounts, np.ones(len(demand), dtype=np.int64), problem)
        placed = [{replica_of[number]: amount for number, amount in each.items()} for each in amounts]
        return within_host_memory(Plan.of_weights(placed), problem)


def expected_loads(plan: Plan, problem: PlacementProblem) -> float:
    """Return the part of the demand whose adapter has to be loaded first, if each replica evicts the least
    recently used adapter (by Che's approximation)."""
    assert problem.num_slots is not None
    total = float(problem.demand.sum())
    if not total:
        return 0.0
    rates: list[list[float]] = [[] for _ in range(problem.num_replicas)]
    for entry, demand in zip(plan.entries(), problem.demand.tolist(), strict=True):
        for replica, share in zip(entry.replicas, entry.shares, strict=True):
            rates[replica].append(demand * share)
    return sum(_missed(np.array(each), problem.num_slots) for each in rates) / total


def _missed(rates: FloatArray, num_slots: int) -> float:
    """Return the rate of requests whose adapter is in no slot."""
    rates = rates[rates > 0]
    if len(rates) <= num_slots:
        return 0.0
    # All adapters stay for the same time after a use: the time for which the expected number present equals
    # the slots.
    low, high = 0.0, 1.0 / float(rates.min()) * 64
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-rates * middle).sum() < num_slots else (low, middle)
    return float((rates * np.exp(-rates * high)).sum())


def _pieces(demand: FloatArray, num_replicas: int) -> list[_Piece]:
    """Return the adapters, highest demand first; those with more than a replica's share in equal parts."""
    most = _MOST_OVER_FAIR * float(demand.sum()) / num_replicas
    found = []
    for adapter, amount in enumerate(demand.tolist()):
        count = min(math.ceil(amount / most), num_replicas)
        found += [_Piece(amount / count, adapter)] * count
    return sorted(found, key=lambda piece: (-piece.amount, piece.adapter))


def _groups(pieces: Sequence[_Piece], num_replicas: int, num_slots: int) -> list[list[_Piece]]:
    """Return the pieces of each replica: as many replicas as possible have no more pieces than slots."""
    ends = [0.0, *accumulate(piece.amount for piece in pieces)]
    most = _MOST_OVER_FAIR * ends[-1] / num_replicas
    for num_kept in range(num_replicas, 0, -1):
        count, num_others = min(num_kept * num_slots, len(pieces)), num_replicas - num_kept
        if ends[-1] - ends[count] > most * num_others or ends[count] > most * num_kept:
            continue
        kept = _spread(pieces[:count], num_kept, num_slots)
        if max(sum(piece.amount for piece in group) for group in kept) <= most:
            return kept + _spread(pieces[count:], num_others, len(pieces) - count)
    return _spread(pieces, num_replicas, len(pieces))


def _spread(pieces: Sequence[_Piece], num_groups: int, most: int) -> list[list[_Piece]]:
    """Return `num_groups` groups of about equal amounts, with at most `most` pieces each, and where possible
    only one piece of an adapter: each piece, the largest first, goes to the group with the least."""
    groups: list[list[_Piece]] = [[] for _ in range(num_groups)]
    held: list[set[int]] = [set() for _ in range(num_groups)]
    emptiest = [(0.0, group) for group in range(num_groups)]
    heapify(emptiest)
    for piece in pieces:
        passed = []
        while emptiest and piece.adapter in held[emptiest[0][1]]:
            passed.append(heappop(emptiest))
        amount, group = heappop(emptiest) if emptiest else passed.pop()
        groups[group].append(piece)
        held[group].add(piece.adapter)
        if len(groups[group]) < most:
            passed.append((amount + piece.amount, group))
        for each in passed:
            heappush(emptiest, each)
    return groups
