"""The six steps of LoRAServe, each by hand, and its moves against all permutations."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from placement_problems import POINTS, num_moves, problem_of, problems

from loraplex.core.errors import UserError
from loraplex.fleet.placements.least_moves import least_moves
from loraplex.fleet.placements.loraserve import (
    LoRAServePlacement,
    pack_ranks,
    place_leftovers,
    replicas_by_rank,
    utilisation_by_rank,
)
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.placements.rank_bins import RankBins
from loraplex.fleet.placements.utilisation import utilisation_by_replica
from loraplex.fleet.plan import Plan

LORASERVE = LoRAServePlacement(operating_points=POINTS)


def bins_of(num_bins: int, num_adapters: int, target: float = 1.0, *, padded: bool = True) -> RankBins:
    return RankBins(
        num_bins=num_bins,
        num_adapters=num_adapters,
        operating_points=POINTS,
        target=target,
        padded=padded,
    )


def test_step_1_adds_demand_over_operating_points() -> None:
    problem = problem_of(ranks=[128, 8, 8, 64], demand=[50.0, 100.0, 300.0, 0.0], num_replicas=2)
    used = utilisation_by_rank(problem, problem.demand, POINTS)
    assert used == pytest.approx({8: 1.0, 64: 0.0, 128: 0.5})


@pytest.mark.parametrize(
    ("used", "num_replicas", "budgets"),
    [
        ({8: 2.2, 128: 1.8}, 4, {8: 2, 128: 2}),
        ({8: 3.0, 128: 1.0}, 4, {8: 3, 128: 1}),
        ({8: 0.1, 16: 0.0, 128: 0.9}, 3, {8: 0, 16: 0, 128: 3}),
        (dict.fromkeys((8, 16, 32, 64, 128), 0.8), 4, {8: 0, 16: 1, 32: 1, 64: 1, 128: 1}),
        ({8: 0.0, 16: 0.0}, 4, {8: 0, 16: 0}),
    ],
)
def test_step_2_gives_out_all_replicas_by_largest_remainder(
    used: dict[int, float], num_replicas: int, budgets: dict[int, int]
) -> None:
    assert replicas_by_rank(used, num_replicas) == budgets


def test_step_3_splits_what_is_beyond_the_room_of_a_bin() -> None:
    """Two bins of 160 tokens/s. Adapter 1 fills one with 160 of its 240; 80 and adapter 0 fill the other."""
    bins = bins_of(2, 2, target=0.4)
    leftovers = pack_ranks(bins, {8: 2}, np.array([8, 8]), np.array([80.0, 240.0]))
    assert leftovers == []
    assert bins.tokens_per_s == [{1: 80.0}, {0: 160.0, 1: 80.0}]
    assert bins.used == pytest.approx([0.4, 0.4])


def test_step_3_leaves_over_what_its_bins_have_no_room_for() -> None:
    bins = bins_of(1, 3)
    demand = np.array([300.0, 300.0, 7.0])
    leftovers = pack_ranks(bins, {8: 1, 64: 0}, np.array([8, 8, 64]), demand)
    assert leftovers == [(1, 200.0), (2, 7.0)]
    assert bins.tokens_per_s == [{0: 300.0}, {0: 100.0}, {}]


def test_step_4_prefers_the_highest_rank_and_then_the_least_used() -> None:
    """Bins: rank 128 full, ranks 64 half full and a quarter full, rank 8 empty but for a little."""
    bins = bins_of(4, 6)
    for index, (rank, tokens_per_s) in enumerate([(128, 100.0), (64, 100.0), (64, 50.0), (8, 4.0)]):
        bins.put(index, index, rank, tokens_per_s)
    place_leftovers(bins, [(4, 10.0), (5, 10.0)], np.array([128, 64, 64, 8, 8, 64]))
    assert bins.tokens_per_s[4:] == [{2: 10.0}, {2: 10.0}]
    assert bins.used[2] == pytest.approx(70 / 200)


def test_step_4_puts_a_rank_above_all_others_where_it_slows_down_least() -> None:
    """At rank 128 the bins are used by 200 / 100 and 40 / 100."""
    bins = bins_of(2, 3)
    bins.put(0, 0, 8, 200.0)
    bins.put(1, 1, 8, 40.0)
    place_leftovers(bins, [(2, 20.0)], np.array([8, 8, 128]))
    assert bins.tokens_per_s[2] == {1: 20.0}
    assert bins.used == pytest.approx([0.5, 0.6])
    assert bins.max_ranks == [8, 128]


def test_step_4_leaves_room_for_low_ranks_that_a_high_rank_cannot_use() -> None:
    """At rank 128 no bin has room, so that the one with 1.5 takes adapter 2; rank 8 has room in the other."""
    bins = bins_of(2, 4)
    bins.put(0, 0, 8, 200.0)
    bins.put(1, 1, 8, 150.0)
    place_leftovers(bins, [(2, 10.0), (3, 100.0)], np.array([8, 8, 128, 8]))
    assert bins.tokens_per_s[2:] == [{1: 10.0}, {0: 100.0}]


@pytest.mark.parametrize(("padded", "shares"), [(True, (5 / 6, 1 / 6)), (False, (1 / 3, 2 / 3))])
def test_leftovers_count_by_the_rank_that_sets_the_pace(padded: bool, shares: tuple[float, ...]) -> None:
    """Utilisations are 0.5 (rank 128) and 2 x 0.75 (rank 8), with a replica each. Adapter 2 has 100 of
    its 300 beside adapter 1. Beside rank 128 there is room for half of 100 tokens/s if kernels pad, else of
    400; what is left goes to the first of two full replicas."""
    problem = problem_of(ranks=[128, 8, 8], demand=[50.0, 300.0, 300.0], num_replicas=2)
    plan = LoRAServePlacement(operating_points=POINTS, padded=padded).place(problem)
    assert plan.replicas == ((1,), (0,), (0, 1))
    assert plan.shares[2] == pytest.approx(shares)


def test_step_5_moves_the_fewest_bytes_not_the_fewest_adapters() -> None:
    """Bin 0 has two adapters of 1 byte that replica 0 held, and one of 10 that replica 1 held."""
    previous = Plan.with_equal_shares([[0], [0], [1]])
    problem = problem_of(
        ranks=[8] * 3, num_bytes=[1, 1, 10], demand=[1.0] * 3, num_replicas=2, previous=previous
    )
    assert least_moves([{0: 1.0}, {0: 1.0}, {0: 1.0}], problem.adapters.num_bytes, problem) == [1, 0]


def fetched_bytes(
    contents: list[dict[int, float]], replica_of_bin: list[int], problem: PlacementProblem
) -> int:
    """Return the cost of what the replicas have to fetch if each bin becomes this replica."""
    previous = () if problem.previous is None else problem.previous.replicas
    return sum(
        int(problem.adapters.num_bytes[adapter])
        for adapter, by_bin in enumerate(contents)
        for index in by_bin
        if adapter >= len(previous) or replica_of_bin[index] not in previous[adapter]
    )


@given(problems(max_replicas=5))
def test_no_numbering_of_the_replicas_moves_less(problem: PlacementProblem) -> None:
    unnumbered = LORASERVE.place(replace(problem, previous=None, host_bytes=None))
    contents = [
        dict(zip(*each, strict=True)) for each in zip(unnumbered.replicas, unnumbered.shares, strict=True)
    ]
    chosen = least_moves(contents, problem.adapters.num_bytes, problem)
    orders = permutations(range(problem.num_replicas))
    least = min(fetched_bytes(contents, list(order), problem) for order in orders)
    assert problem.previous is None or fetched_bytes(contents, chosen, problem) == least


@given(problems())
def test_the_same_demand_again_moves_nothing(problem: PlacementProblem) -> None:
    first = LORASERVE.place(replace(problem, host_bytes=None))
    again = LORASERVE.place(replace(problem, host_bytes=None, previous=first))
    assert num_moves(again, first) == 0


@given(problems())
def test_rank_proportional_kernels_are_loaded_alike(problem: PlacementProblem) -> None:
    """Whatever is left over fits, since the sum of all rooms is what is left over."""
    placement = LoRAServePlacement(operating_points=POINTS, padded=False)
    unbounded = replace(problem, host_bytes=None)
    used = utilisation_by_replica(placement.place(unbounded), unbounded, POINTS, padded=False)
    if problem.demand.any():
        assert used == pytest.approx(np.full(problem.num_replicas, used.mean()), rel=1e-6)


def test_idle_adapters_stay_unless_their_replica_turns_to_lower_ranks() -> None:
    """Replica 0 serves rank 8, replica 1 rank 128. Idle: 2 (rank 8) and 3 (rank 128), both on 0; 4 is new."""
    previous = Plan.with_equal_shares([[0], [1], [0], [0]])
    problem = problem_of(
        ranks=[8, 128, 8, 128, 8], demand=[400.0, 100.0, 0, 0, 0], num_replicas=2, previous=previous
    )
    assert LORASERVE.place(problem).replicas == ((0,), (1,), (0,), (1,), (0,))


def test_idle_adapters_are_spread_by_size() -> None:
    """From 2 bytes on each replica: 6 to the first, 4 and 2 to the second; the last to the first."""
    problem = problem_of(
        ranks=[8] * 6, num_bytes=[2, 2, 6, 4, 2, 2], demand=[1.0, 1.0, 0, 0, 0, 0], num_replicas=2
    )
    plan = LORASERVE.place(problem)
    assert plan.bytes_by_replica(problem.adapters, 2).tolist() == [10, 8]


def test_without_any_demand_adapters_count_alike() -> None:
    plan = LORASERVE.place(problem_of(ranks=[8, 8, 128, 128], demand=[0.0] * 4, num_replicas=2))
    plan.check(4, 2)
    assert set(plan.copies().replicas.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ({8: 1.0}, "no operating point for rank 24, which 2 adapters have; ranks with one: 8"),
        ({8: 1.0, 24: 0.0}, "operating point of rank 24 is 0 tokens/s"),
    ],
)
def test_ranks_without_a_usable_operating_point_are_refused(points: dict[int, float], words: str) -> None:
    problem = problem_of(ranks=[8, 24, 24], demand=[1.0] * 3, num_replicas=2)
    with pytest.raises(UserError, match=words):
        LoRAServePlacement(operating_points=points).place(problem)
