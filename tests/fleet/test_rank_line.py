"""Our placement by hand: a line of adapters that is cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from placement_problems import POINTS, num_moves, problem_of, problems

from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.placements.rank_line import RankLinePlacement
from loraplex.fleet.placements.token_rates import token_rates
from loraplex.fleet.placements.utilisation import utilisation_by_replica
from loraplex.fleet.plan import Plan
from loraplex.perf.set_costs import PaddedSetCosts

PADDED = RankLinePlacement(token_rates=POINTS, padded=True)
OWN_PACE = RankLinePlacement(token_rates=POINTS, padded=False)


def busy(plan: Plan, problem: PlacementProblem, *, padded: bool = True) -> list[float]:
    return utilisation_by_replica(plan, problem, POINTS, padded=padded).tolist()


def test_padded_kernels_get_replicas_for_the_large_ranks_alone() -> None:
    """100 tokens/s of rank 128 keep a replica busy all the time; so do 400 of rank 8."""
    problem = problem_of(ranks=[8, 128, 8, 128], demand=[200.0, 50.0, 200.0, 50.0], num_replicas=2)
    plan = PADDED.place(problem)
    assert plan.replicas == ((1,), (0,), (1,), (0,))
    assert busy(plan, problem) == pytest.approx([1.0, 1.0])


def test_an_adapter_at_a_cut_is_served_on_both_sides() -> None:
    problem = problem_of(ranks=[64, 64, 64], demand=[100.0, 100.0, 100.0], num_replicas=2)
    plan = PADDED.place(problem)
    assert sorted(map(len, plan.replicas)) == [1, 1, 2]
    assert busy(plan, problem) == pytest.approx([0.75, 0.75])


def test_an_adapter_that_needs_several_replicas_has_them() -> None:
    problem = problem_of(ranks=[64, 8], demand=[600.0, 100.0], num_replicas=4)
    plan = PADDED.place(problem)
    assert len(plan.replicas[0]) >= 3
    assert max(busy(plan, problem)) < 1.01 * (600 + 100) / 200 / 4 + 0.1


@given(problems(with_previous=False))
def test_without_padding_all_replicas_are_equally_busy(problem: PlacementProblem) -> None:
    """This holds except for the demand expected at spare copies, and the minimum that idle adapters count
    for. Larger fleets also limit the bytes of a replica: few adapters cannot be spread evenly there."""
    demand = [max(each, 1.0) for each in problem.demand.tolist()]
    num_replicas = 1 + problem.num_replicas % 3
    problem = problem_of(ranks=problem.adapters.ranks.tolist(), demand=demand, num_replicas=num_replicas)
    used = busy(OWN_PACE.place(problem), problem, padded=False)
    assert max(used) <= 1.2 * sum(used) / len(used) + 0.02 * max(problem.demand) / min(POINTS.values())


def test_without_padding_many_adapters_keep_a_large_fleet_equally_busy() -> None:
    ranks = [8, 16, 32, 64, 128] * 40
    problem = problem_of(ranks=ranks, demand=[1.0 + number % 7 for number in range(200)], num_replicas=8)
    used = busy(OWN_PACE.place(problem), problem, padded=False)
    assert max(used) <= 1.2 * sum(used) / len(used)


def test_a_little_drift_moves_little() -> None:
    rng = np.random.default_rng(0)
    ranks = rng.choice([8, 16, 32, 64, 128], 400).tolist()
    demand = rng.exponential(1.0, 400)
    first = PADDED.place(problem_of(ranks=ranks, demand=demand.tolist(), num_replicas=8))
    drifted = (demand * rng.uniform(0.9, 1.1, 400)).tolist()
    problem = problem_of(ranks=ranks, demand=drifted, num_replicas=8, previous=first)
    second = PADDED.place(problem)
    assert num_moves(second, first) < 40
    assert max(busy(second, problem)) <= max(busy(first, problem)) * 1.02


def test_copies_take_a_quarter_of_the_memory_of_everywhere_at_most() -> None:
    rng = np.random.default_rng(1)
    ranks, demand = [8] * 300, rng.pareto(1.0, 300).tolist()
    for num_replicas in (4, 8, 16, 60):
        plan = PADDED.place(problem_of(ranks=ranks, demand=demand, num_replicas=num_replicas))
        # Every adapter has one copy, and an adapter at a cut has two: with four replicas there are no others.
        assert plan.num_copies <= max(0.25 * num_replicas * 300, 300 + num_replicas)


@pytest.mark.parametrize("placement", [PADDED, OWN_PACE])
def test_no_replica_holds_all_that_is_asked_for_seldom(placement: RankLinePlacement) -> None:
    """The load of a few adapters would keep seven of eight replicas busy; the last had all others."""
    ranks, demand = [8, 128] * 50, [100.0] * 8 + [0.01] * 92
    problem = problem_of(ranks=ranks, demand=demand, num_replicas=8)
    plan = placement.place(problem)
    held = np.zeros(8)
    for size, replicas in zip(problem.adapters.num_bytes.tolist(), plan.replicas, strict=True):
        held[list(replicas)] += size
    assert held.max() < 0.25 * problem.adapters.num_bytes.sum()


def test_what_nobody_asks_for_is_spread() -> None:
    plan = PADDED.place(problem_of(ranks=[8] * 60, demand=[0.0] * 60, num_replicas=6))
    assert np.bincount(plan.copies().replicas, minlength=6).min() >= 9


def test_token_rates_follow_the_costs() -> None:
    costs = PaddedSetCosts(
        decode_rank_s=1e-6,
        decode_base_s=5e-3,
        prefill_token_s=1e-5,
        prefill_token_rank_s=1e-8,
        prefill_base_s=1e-3,
    )
    rates = token_rates(costs, [64, 8, 64])
    assert list(rates) == [8, 64]
    request_s = 1e-3 + 128 * (1e-5 + 64e-8) + (5e-3 + 32 * 64e-6) * 155 / 32
    assert rates[64] == pytest.approx((128 + 155) / request_s)
    assert rates[8] > rates[64]


def test_spare_copies_make_no_replica_slower() -> None:
    """They are placed where ranks are not smaller, because kernels pad to the largest."""
    problem = problem_of(ranks=[8, 16, 32, 64, 128] * 5, demand=[100.0] * 25, num_replicas=8)
    plan = PADDED.place(problem)
    spares = [adapter for adapter, replicas in enumerate(plan.replicas) if len(replicas) > 1]
    assert len(spares) > 5, "all of them have the load for it, and some find room"
    used = busy(plan, problem)
    assert max(used) < 1.25 * sum(used) / len(used)
