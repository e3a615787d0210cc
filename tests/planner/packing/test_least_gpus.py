from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_problems import CapacityJudge, demand_of, demands, judges

from loraplex.planner.demand import Demand, PlanError
from loraplex.planner.packing.improve import LocalImprovement
from loraplex.planner.packing.least_gpus import least_gpus
from loraplex.planner.packing.least_rate import LeastRate
from loraplex.planner.packing.max_pack import MaxPack
from loraplex.planner.packing.packer import Packer


def succeeds(packer: Packer, demand: Demand, num_gpus: int) -> bool:
    try:
        packer.pack(demand, num_gpus)
    except PlanError:
        return False
    return True


@given(demands(30), judges())
def test_a_greedy_packer_needs_the_number_that_linear_search_finds(
    demand: Demand, judge: CapacityJudge
) -> None:
    packer = MaxPack(judge=judge)
    if succeeds(packer, demand, 30):
        linear = next((each for each in range(1, 31) if succeeds(packer, demand, each)), 0)
        assert max(len(least_gpus(packer, demand, 30)), 1) == linear


@given(demands(30), judges(), st.integers(1, 30))
def test_a_spreading_packer_fails_with_one_gpu_less(
    demand: Demand, judge: CapacityJudge, most_gpus: int
) -> None:
    packer = LeastRate(judge=judge)
    if succeeds(packer, demand, most_gpus):
        plans = least_gpus(packer, demand, most_gpus)
        assert len(plans) < 2 or not succeeds(packer, demand, len(plans) - 1)


def test_a_greedy_packer_packs_once() -> None:
    judge = CapacityJudge(capacity_tok_s=1600, cost_of_slot=0, cost_of_waiting=0)
    demand = demand_of(*[(8, 1.0)] * 160)
    MaxPack(judge=judge).pack(demand, 64)
    once = len(judge.calls)
    judge.calls.clear()
    assert len(least_gpus(MaxPack(judge=judge), demand, 64)) == 10
    assert len(judge.calls) == once
    judge.calls.clear()
    packer = MaxPack(judge=judge)
    improving = LocalImprovement(packer=packer, judge=judge, most_judgements=0, divides_evenly=False)
    assert len(least_gpus(improving, demand, 64)) == 10
    repairing = 10
    assert len(judge.calls) == once + repairing


@given(demands(30), judges(), st.integers(1, 30))
def test_a_number_to_begin_with_changes_nothing_if_fewer_do_not_do(
    demand: Demand, judge: CapacityJudge, at_least: int
) -> None:
    packer = MaxPack(judge=judge)
    if succeeds(packer, demand, 30):
        least = least_gpus(packer, demand, 30)
        assert least_gpus(packer, demand, 30, at_least=min(at_least, max(len(least), 1))) == least


def test_what_the_packer_raises_for_the_most_gpus_is_raised() -> None:
    packer = MaxPack(judge=CapacityJudge(capacity_tok_s=900))
    with pytest.raises(PlanError, match="8 of 24 adapters; 3 GPUs would do"):
        least_gpus(packer, demand_of(*[(8, 1.0)] * 24), 2)
    with pytest.raises(PlanError, match="give at least one"):
        least_gpus(packer, demand_of((8, 1.0)), 0)
