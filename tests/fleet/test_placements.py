"""The simple placements computed by hand, and the invariants of all placements."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import DIVIDING, POINTS, problem_of, problems

from loraplex.core.errors import UserError
from loraplex.fleet.placements.contiguous import ContiguousPlacement
from loraplex.fleet.placements.host_memory import within_host_memory
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.placements.random_placement import RandomPlacement
from loraplex.fleet.placements.utilisation import utilisation_by_replica
from loraplex.fleet.plan import Plan

names = st.sampled_from(sorted(DIVIDING))


@given(problems(), names)
def test_every_plan_is_whole_and_within_memory(problem: PlacementProblem, name: str) -> None:
    plan = DIVIDING[name].place(problem)
    plan.check(len(problem.adapters), problem.num_replicas)
    if problem.host_bytes is not None:
        assert plan.bytes_by_replica(problem.adapters, problem.num_replicas).max() <= problem.host_bytes


@given(problems(), names)
def test_a_placement_repeats_itself_and_changes_nothing(problem: PlacementProblem, name: str) -> None:
    before = deepcopy(problem)
    plan = DIVIDING[name].place(problem)
    assert plan == DIVIDING[name].place(before)
    for column in ("ranks", "num_bytes"):
        assert np.array_equal(getattr(problem.adapters, column), getattr(before.adapters, column))
    assert np.array_equal(problem.demand, before.demand)
    assert problem.previous == before.previous


def test_contiguous_sorts_by_rank_and_deals_out_equal_numbers() -> None:
    """The order by rank is 1, 4 (8), 3 (16), 0, 2 (64); three replicas get two, two and one of them."""
    problem = problem_of(ranks=[64, 8, 64, 16, 8], demand=[9.0, 0, 0, 0, 0], num_replicas=3)
    assert ContiguousPlacement().place(problem).replicas == ((1,), (0,), (2,), (1,), (0,))


@given(problems(with_previous=False), st.integers(1, 12))
def test_random_is_static(problem: PlacementProblem, num_first: int) -> None:
    """Adapters that come later, and demand, change nothing about those that are placed."""
    ranks = problem.adapters.ranks.tolist()
    asked = {"num_replicas": problem.num_replicas, "seed": problem.seed}
    plan = RandomPlacement().place(problem_of(ranks=ranks, demand=problem.demand.tolist(), **asked))
    first = RandomPlacement().place(
        problem_of(ranks=ranks[:num_first], demand=[1.0] * len(ranks[:num_first]), **asked)
    )
    assert plan.replicas[:num_first] == first.replicas


def test_random_follows_its_seed() -> None:
    plans = {
        RandomPlacement()
        .place(problem_of(ranks=[8] * 50, demand=[1.0] * 50, num_replicas=5, seed=seed))
        .replicas
        for seed in range(4)
    }
    assert len(plans) == 4
    assert all({home for (home,) in replicas} == set(range(5)) for replicas in plans)


def test_a_full_host_first_gives_up_copies_and_then_idle_adapters() -> None:
    """Replica 0 has 40 bytes of 20: a copy of adapter 0 is removed, then adapter 2, which has no demand."""
    plan = Plan.with_equal_shares([[0, 1], [0], [0], [0]])
    problem = problem_of(
        ranks=[8] * 4, num_bytes=[10] * 4, demand=[9.0, 5.0, 0.0, 2.0], num_replicas=2, host_bytes=20
    )
    assert within_host_memory(plan, problem).replicas == ((1,), (0,), (1,), (0,))


def test_all_is_packed_by_size_where_moving_a_few_does_not_help() -> None:
    """Sizes 6, 4, 4, 3, 3 in two hosts of 10: only 6 + 4 beside 4 + 3 + 3 fits."""
    problem = problem_of(
        ranks=[8] * 5, num_bytes=[4, 3, 6, 3, 4], demand=[1.0] * 5, num_replicas=2, host_bytes=10
    )
    plan = within_host_memory(Plan.of_homes(np.array([0, 0, 0, 0, 0])), problem)
    assert plan.bytes_by_replica(problem.adapters, 2).tolist() == [10, 10]


def test_sizes_that_do_not_pack_are_refused_by_how_much() -> None:
    problem = problem_of(ranks=[8] * 3, num_bytes=[6, 6, 6], demand=[1.0] * 3, num_replicas=2, host_bytes=9)
    with pytest.raises(UserError, match="adapter 2 takes 6 bytes, 3 more than any replica has left"):
        ContiguousPlacement().place(problem)


def test_the_largest_rank_asked_for_sets_the_pace_of_padded_kernels() -> None:
    """Replica 0: 100 tokens/s of rank 8, 50 of rank 64; replica 1: 50 of rank 64, none of rank 128."""
    problem = problem_of(ranks=[8, 64, 128], demand=[100.0, 100.0, 0.0], num_replicas=2)
    plan = Plan.with_equal_shares([[0], [0, 1], [1]])
    padded = utilisation_by_replica(plan, problem, POINTS, padded=True)
    assert padded == pytest.approx([150 / 200, 50 / 200])
    own_pace = utilisation_by_replica(plan, problem, POINTS, padded=False)
    assert own_pace == pytest.approx([100 / 400 + 50 / 200, 50 / 200])
    assert utilisation_by_replica(plan, problem, None, padded=True).tolist() == [150.0, 50.0]
