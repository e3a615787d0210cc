"""The greedy packing on cases computed by hand, and its invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_problems import (
    CapacityJudge,
    check_good,
    check_holds_once,
    demand_of,
    demands,
    fewest_gpus,
    judges,
)

from loraplex.planner.demand import Demand, PlanError
from loraplex.planner.packing.max_pack import MaxPack
from loraplex.planner.packing.packer import NotEnoughGpusError


def packed_or_none(judge: CapacityJudge, demand: Demand, has_slots: bool) -> object:
    try:
        return MaxPack(judge=judge, has_slots=has_slots).pack(demand, 100)
    except PlanError:
        return None


def test_tests_happen_at_testing_points_with_the_present_and_the_next_slots() -> None:
    judge = CapacityJudge(capacity_tok_s=3400, cost_of_slot=0)
    (plan,) = MaxPack(judge=judge).pack(demand_of(*[(8, 1.0)] * 32), 1)
    assert judge.calls == [(8, 8), (16, 8), (16, 16), (32, 16), (32, 32)]
    assert plan.num_slots == 32


def test_the_present_slots_stay_if_more_lower_the_throughput() -> None:
    judge = CapacityJudge(capacity_tok_s=1500, cost_of_slot=1, cost_of_waiting=0)
    (plan,) = MaxPack(judge=judge).pack(demand_of(*[(8, 0.9)] * 16), 1)
    assert judge.calls == [(8, 8), (16, 8), (16, 16)]
    assert plan.num_slots == 8


def test_slots_that_do_not_fit_are_not_considered() -> None:
    judge = CapacityJudge(memory=8 * 16, cost_of_slot=0, cost_of_waiting=0)
    (plan,) = MaxPack(judge=judge).pack(demand_of(*[(8, 0.1)] * 64), 1)
    assert plan.num_slots == 16


def test_what_starves_a_gpu_goes_back_to_the_front_of_the_queue() -> None:
    judge = CapacityJudge(capacity_tok_s=2000, cost_of_slot=0, cost_of_waiting=0)
    plans = MaxPack(judge=judge).pack(demand_of(*[(8, 1.0)] * 32), 2)
    assert [len(each.adapters) for each in plans] == [16, 16]
    assert [each.name for each in plans[0].adapters] < [each.name for each in plans[1].adapters]
    assert judge.calls[3:5] == [(32, 16), (32, 32)]


def test_the_last_test_is_filled_up_to_the_next_testing_point() -> None:
    judge = CapacityJudge(capacity_tok_s=1600, cost_of_slot=0)
    (plan,) = MaxPack(judge=judge).pack(demand_of(*[(8, 1.0)] * 10), 1)
    assert judge.calls == [(8, 8), (16, 8), (16, 16), (10, 16)]
    assert (len(plan.adapters), plan.num_slots) == (10, 16)


def test_a_gpu_that_fails_its_last_test_leaves_the_rest_to_another() -> None:
    judge = CapacityJudge(capacity_tok_s=1000, cost_of_slot=0, cost_of_waiting=0)
    plans = MaxPack(judge=judge).pack(demand_of(*[(8, 1.0)] * 10), 4)
    assert [len(each.adapters) for each in plans] == [8, 2]


def test_a_gpu_that_starves_at_its_first_test_gets_fewer_adapters() -> None:
    judge = CapacityJudge(capacity_tok_s=500, cost_of_slot=0)
    plans = MaxPack(judge=judge).pack(demand_of(*[(8, 1.0)] * 9), 4)
    assert [len(each.adapters) for each in plans] == [4, 4, 1]


def test_a_gpu_without_slots_is_judged_once_a_testing_point() -> None:
    judge = CapacityJudge(capacity_tok_s=4000)
    (plan,) = MaxPack(judge=judge, has_slots=False).pack(demand_of(*[(8, 1.0)] * 32), 1)
    assert judge.calls == [(8, None), (16, None), (32, None)]
    assert plan.num_slots is None


def test_no_adapters_need_no_gpu() -> None:
    assert MaxPack(judge=CapacityJudge()).pack(demand_of(), 3) == ()


@pytest.mark.parametrize("has_slots", [True, False])
def test_an_adapter_that_starves_a_gpu_alone_is_named(has_slots: bool) -> None:
    judge = CapacityJudge(capacity_tok_s=1000, cost_of_slot=0)
    with pytest.raises(
        PlanError, match=r"'1' starves a GPU alone: its 12 requests/s are 1,200 .* serves 1,000;"
    ):
        MaxPack(judge=judge, has_slots=has_slots).pack(demand_of((8, 1), (8, 12)), 9)


@pytest.mark.parametrize("has_slots", [True, False])
def test_an_adapter_larger_than_a_gpu_is_named(has_slots: bool) -> None:
    with pytest.raises(PlanError, match=r"'1' \(rank 9000\) is larger than a GPU .*lower its rank"):
        MaxPack(judge=CapacityJudge(), has_slots=has_slots).pack(demand_of((8, 1), (9000, 1)), 9)


def test_too_few_gpus_are_refused_with_the_number_that_would_do() -> None:
    judge = CapacityJudge(capacity_tok_s=1000, cost_of_slot=0, cost_of_waiting=0)
    with pytest.raises(NotEnoughGpusError, match=r"GPUs \(2\): .* 14 of 30 adapters; 4 GPUs would") as caught:
        MaxPack(judge=judge).pack(demand := demand_of(*[(8, 1.0)] * 30), 2)
    assert caught.value.plans == MaxPack(judge=judge).pack(demand, 4)


def test_zero_gpus_are_refused() -> None:
    with pytest.raises(PlanError, match="give at least one"):
        MaxPack(judge=CapacityJudge()).pack(demand_of((8, 1)), 0)


@given(demands(80), judges(), st.booleans())
def test_every_adapter_is_placed_once_and_no_gpu_starves(
    demand: Demand, judge: CapacityJudge, has_slots: bool
) -> None:
    try:
        plans = MaxPack(judge=judge, has_slots=has_slots).pack(demand, 100)
    except PlanError:
        return
    # Each GPU has at most a dozen testing points here, each with two judgements, and three halved tests.
    assert len(judge.calls) <= 20 * len(plans)
    check_holds_once(plans, demand, 100)
    check_good(plans, judge, has_slots=has_slots)


@given(demands(6), judges(), st.booleans())
def test_no_fewer_gpus_are_used_than_there_must_be(
    demand: Demand, judge: CapacityJudge, has_slots: bool
) -> None:
    fewest = fewest_gpus(demand, judge, has_slots=has_slots)
    plans = packed_or_none(judge, demand, has_slots)
    if fewest is None:
        assert plans is None, "no plan is good"
    elif plans is None:
        # Only 8 slots are tried for the first adapters, as published.
        assert has_slots
    else:
        assert isinstance(plans, tuple)
        assert len(plans) >= fewest


def test_judgements_for_many_adapters_are_few() -> None:
    judge = CapacityJudge(capacity_tok_s=3600, cost_of_slot=0, cost_of_waiting=0)
    plans = MaxPack(judge=judge).pack(demand_of(*[(8, 0.1)] * 1280), 4)
    assert [len(each.adapters) for each in plans] == [384, 384, 384, 128]
    assert len(judge.calls) <= 4 * 2 * 12
