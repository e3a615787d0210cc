"""Local improvement on cases computed by hand, and its invariants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_problems import (
    RANKS,
    RATES,
    CapacityJudge,
    check_good,
    check_holds_once,
    demand_of,
    demands,
    fewest_gpus,
    judges,
)

from loraplex.planner.demand import Demand, PlanError
from loraplex.planner.packing.improve import LocalImprovement, improve
from loraplex.planner.packing.max_pack import MaxPack
from loraplex.planner.packing.packer import NotEnoughGpusError
from loraplex.planner.packing.random_packing import RandomPacking
from loraplex.planner.plan import GpuPlan


def flat(capacity_tok_s: float) -> CapacityJudge:
    return CapacityJudge(capacity_tok_s=capacity_tok_s, cost_of_slot=0, cost_of_waiting=0)


def divided(demand: Demand, *sizes: int, num_slots: int | None = 8) -> list[GpuPlan]:
    """Return a plan with so many adapters on each GPU, in their order."""
    rest = iter(demand.adapters)
    return [GpuPlan(adapters=tuple(next(rest) for _ in range(size)), num_slots=num_slots) for size in sizes]


def rates(plans: tuple[GpuPlan, ...]) -> list[float]:
    return sorted(round(sum(each.rate_rps for each in plan.adapters), 6) for plan in plans)


def test_the_least_loaded_gpu_is_emptied_into_the_others() -> None:
    demand = demand_of(*[(8, 1.0)] * 24)
    improved = improve(divided(demand, 9, 9, 6), demand, flat(1200))
    assert rates(improved) == [12, 12]


def test_an_adapter_that_blocks_is_passed_over() -> None:
    """The one with 5 requests/s fits neither GPU beside what is there, but the others fit one of them."""
    demand = demand_of((8, 9), (8, 4), (8, 5), (8, 0.5), (8, 0.5))
    improved = improve(divided(demand, 1, 1, 3), demand, flat(1000))
    assert rates(improved) == [9.5, 9.5]


def test_the_highest_rate_is_lowered_by_moves() -> None:
    demand = demand_of(*[(8, 1.0)] * 12)
    assert rates(improve(divided(demand, 10, 2), demand, flat(1000))) == [6, 6]


def test_the_highest_rate_is_lowered_by_swaps() -> None:
    demand = demand_of((8, 8.0), (8, 3.0), (8, 5.0), (8, 2.0))
    assert rates(improve(divided(demand, 2, 2), demand, flat(1100))) == [8, 10]
    demand = demand_of((8, 6.0), (8, 5.0), (8, 4.0), (8, 3.0))
    assert rates(improve(divided(demand, 2, 2), demand, flat(1100))) == [9, 9]


def test_moves_bring_no_larger_rank_to_a_gpu() -> None:
    demand = demand_of((32, 3.0), (32, 3.0), (8, 1.0))
    plans = divided(demand, 2, 1)
    assert improve(plans, demand, flat(620), divides_evenly=False) == tuple(plans)


def test_a_starving_gpu_is_repaired_with_room_elsewhere() -> None:
    demand = demand_of(*[(8, 1.0)] * 16)
    improved = improve(divided(demand, 14, 2), demand, flat(1000))
    assert rates(improved) == [8, 8]


def test_a_starving_gpu_is_repaired_with_a_new_one() -> None:
    demand = demand_of(*[(8, 1.0)] * 16)
    assert rates(improve(divided(demand, 16), demand, flat(1000))) == [8, 8]


def test_slots_change_where_others_are_needed() -> None:
    demand = demand_of(*[(8, 0.1)] * 12)
    judge = CapacityJudge(capacity_tok_s=160, cost_of_slot=0, cost_of_waiting=15)
    (plan,) = improve(divided(demand, 8, 4), demand, judge)
    assert plan.num_slots == 16


def test_slots_that_do_not_fit_become_the_most_that_do() -> None:
    demand = demand_of(*[(8, 0.1)] * 100)
    judge = CapacityJudge(memory=8 * 40, cost_of_slot=0)
    (plan,) = improve(divided(demand, 100, num_slots=600), demand, judge)
    assert plan.num_slots == 32


def test_an_adapter_that_starves_a_gpu_alone_is_named() -> None:
    demand = demand_of((8, 1.0), (8, 30.0))
    with pytest.raises(PlanError, match="'1' starves a GPU alone"):
        improve(divided(demand, 2), demand, flat(1000))
    with pytest.raises(PlanError, match=r"'0' \(rank 2000\) is larger than a GPU"):
        improve(divided(demand_of((2000, 1.0)), 1), demand_of((2000, 1.0)), flat(1000))


def test_no_plan_is_improved_to_none() -> None:
    assert improve([], demand_of(), flat(1)) == ()


def test_improvement_saves_gpus_that_the_greedy_packing_needs() -> None:
    """It stops at 16 adapters, as 32 starve; a GPU serves 25."""
    demand, judge = demand_of(*[(8, 1.0)] * 75), flat(2500)
    with pytest.raises(NotEnoughGpusError):
        MaxPack(judge=judge).pack(demand, 3)
    assert rates(LocalImprovement(packer=MaxPack(judge=judge), judge=judge).pack(demand, 3)) == [25, 25, 25]


def test_too_few_gpus_are_refused_with_the_number_that_would_do() -> None:
    judge = flat(2250)  # Nine tenths of what is offered are enough.
    with pytest.raises(NotEnoughGpusError, match=r"GPUs \(2\): .* 3 GPUs would do"):
        LocalImprovement(packer=MaxPack(judge=judge), judge=judge).pack(demand_of(*[(8, 1.0)] * 75), 2)


@given(demands(40), judges(), st.integers(0, 3), st.booleans(), st.integers(0, 300))
def test_a_random_plan_becomes_good_and_judgements_are_bounded(
    demand: Demand, judge: CapacityJudge, seed: int, has_slots: bool, most_judgements: int
) -> None:
    plans = RandomPacking(seed=seed, has_slots=has_slots).pack(demand, 4)
    plans = tuple(replace(each, num_slots=8 if has_slots else None) for each in plans)
    try:
        repaired = improve(plans, demand, judge, most_judgements=0)
    except PlanError:
        return
    check_holds_once(repaired, demand, 40)
    check_good(repaired, judge, has_slots=has_slots)
    judge.calls.clear()
    improved = improve(repaired, demand, judge, most_judgements=most_judgements)
    # The last GPU to be offered adapters, or the last exchange, may take some more.
    assert len(judge.calls) <= len(repaired) + most_judgements + 200
    check_holds_once(improved, demand, len(repaired))
    check_good(improved, judge, has_slots=has_slots)
    if len(improved) == len(repaired) and repaired:
        assert rates(improved)[-1] <= rates(repaired)[-1]
    assert improved == improve(repaired, demand, judge, most_judgements=most_judgements)


@given(demands(6), judges(), st.integers(1, 6), st.booleans())
def test_tiny_demands_need_about_as_many_gpus_as_by_brute_force(
    demand: Demand, judge: CapacityJudge, num_gpus: int, has_slots: bool
) -> None:
    fewest = fewest_gpus(demand, judge, has_slots=has_slots)
    by_chance = RandomPacking(seed=0, has_slots=has_slots).pack(demand, num_gpus)
    by_chance = tuple(replace(each, num_slots=8 if has_slots else None) for each in by_chance)
    try:
        greedy = MaxPack(judge=judge, has_slots=has_slots).pack(demand, 6)
        improved = improve(greedy, demand, judge)
        repaired = improve(by_chance, demand, judge, most_judgements=0)
    except PlanError:
        assert fewest is None
        return
    assert fewest is not None
    assert fewest <= len(improved) <= min(len(greedy), fewest + 1)
    assert fewest <= len(repaired)


@pytest.mark.parametrize("has_slots", [True, False])
def test_most_tiny_demands_need_no_more_gpus_than_by_brute_force(has_slots: bool) -> None:
    rng = np.random.default_rng(0)
    excess = []
    for _ in range(200):
        pairs = [(int(rng.choice(RANKS)), float(rng.choice(RATES))) for _ in range(rng.integers(1, 7))]
        demand = demand_of(*pairs)
        judge = CapacityJudge(capacity_tok_s=float(rng.choice([300, 400, 700])))
        fewest = fewest_gpus(demand, judge, has_slots=has_slots)
        assert fewest is not None
        greedy = MaxPack(judge=judge, has_slots=has_slots).pack(demand, 6)
        excess.append(len(improve(greedy, demand, judge)) - fewest)
    assert excess.count(0) / len(excess) > 0.95
