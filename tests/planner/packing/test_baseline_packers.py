"""Packers to compare with, on cases computed by hand, and their invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_problems import CapacityJudge, check_holds_once, demand_of, demands, judges

from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.packing.dlora import DLoraPacking
from loraplex.planner.packing.judged import Judged
from loraplex.planner.packing.least_gpus import least_gpus
from loraplex.planner.packing.least_rate import LeastRate
from loraplex.planner.packing.max_base import MaxBase
from loraplex.planner.packing.packer import NotEnoughGpusError, Packer
from loraplex.planner.packing.random_packing import RandomPacking
from loraplex.planner.plan import GpuPlan, whole_adapters

FOUR_ADAPTERS = demand_of((8, 3.0), (8, 3.0), (8, 4.0), (8, 1.0))


def names(plans: tuple[GpuPlan, ...]) -> list[str]:
    return ["".join(each.name for each in plan.adapters) for plan in plans]


def test_max_base_fills_a_gpu_up_to_the_base_models_rate() -> None:
    plans = MaxBase(base_tok_s=1000).pack(FOUR_ADAPTERS, 2)
    assert names(plans) == ["012", "3"]
    assert [each.num_slots for each in plans] == [3, 1]


@pytest.mark.parametrize(("slots_per_adapter", "num_slots"), [(0.5, 2), (None, None)])
def test_max_base_star_has_half_as_many_slots(slots_per_adapter: float | None, num_slots: int | None) -> None:
    plans = MaxBase(base_tok_s=1000, slots_per_adapter=slots_per_adapter).pack(FOUR_ADAPTERS, 2)
    assert plans[0].num_slots == num_slots


def test_max_base_refuses_too_few_gpus_and_an_adapter_that_starves_alone() -> None:
    with pytest.raises(NotEnoughGpusError, match=r"GPUs \(1\): .* 1 of 4 adapters; 2 GPUs would do"):
        MaxBase(base_tok_s=1000).pack(FOUR_ADAPTERS, 1)
    with pytest.raises(PlanError, match="'2' starves a GPU alone"):
        MaxBase(base_tok_s=350).pack(FOUR_ADAPTERS, 9)


def test_least_rate_spreads_adapters_by_rate_and_holds_all_in_slots() -> None:
    plans = LeastRate(judge=CapacityJudge()).pack(FOUR_ADAPTERS, 2)
    assert names(plans) == ["02", "13"]
    assert [each.num_slots for each in plans] == [2, 2]


def test_least_rate_spreads_adapters_without_requests_too() -> None:
    plans = LeastRate(judge=CapacityJudge()).pack(demand_of(*[(8, 0.0)] * 4), 3)
    assert sorted(len(each.adapters) for each in plans) == [1, 1, 2]


def test_least_rate_refuses_a_plan_that_the_judge_finds_starving() -> None:
    judge = CapacityJudge(capacity_tok_s=500, cost_of_slot=0)
    with pytest.raises(NotEnoughGpusError, match=r"GPUs \(2\): one starves with 2 adapters in 2 slots.* 700"):
        LeastRate(judge=judge).pack(FOUR_ADAPTERS, 2)
    with pytest.raises(PlanError, match="'0' starves a GPU alone"):
        LeastRate(judge=judge).pack(demand_of((8, 6.0)), 2)


def test_random_packing_depends_on_its_seed_alone() -> None:
    demand = demand_of(*[(8, 1.0)] * 20)
    first, again, other = (RandomPacking(seed=seed).pack(demand, 4) for seed in (1, 1, 2))
    assert first == again != other
    assert all(1 <= (each.num_slots or 0) <= len(each.adapters) for each in first)


def dlora(memory: int = 1000, *, has_slots: bool = True) -> DLoraPacking:
    return DLoraPacking(memory=memory, memory_of_rank=lambda rank: rank, has_slots=has_slots)


def test_dlora_copies_adapters_and_divides_their_rates() -> None:
    plans = dlora().pack(FOUR_ADAPTERS, 2)
    assert len(plans) == 2
    assert sum(len(each.adapters) for each in plans) > len(FOUR_ADAPTERS.adapters)
    assert all(each.num_slots == len(each.adapters) for each in plans)


@given(demands(30), st.integers(1, 8), st.sampled_from([64, 1000]), st.booleans())
def test_dlora_holds_every_adapter_and_its_copies_sum_to_the_rate(
    demand: Demand, num_gpus: int, memory: int, has_slots: bool
) -> None:
    plans = dlora(memory, has_slots=has_slots).pack(demand, num_gpus)
    whole = {each.name: each for each in whole_adapters(plans)}
    assert len(whole) == len(demand.adapters)
    assert len(plans) <= num_gpus
    for adapter in demand.adapters:
        assert whole[adapter.name].rank == adapter.rank
        assert whole[adapter.name].rate_rps == pytest.approx(adapter.rate_rps)
    largest = max((each.rank for each in demand.adapters), default=0)

    def taken(adapters: tuple[AdapterDemand, ...]) -> int:
        return sum(largest if has_slots else each.rank for each in adapters)

    # Where first copies exceed the memory they are divided evenly, and there are no others.
    most = max(memory, taken(demand.adapters) / num_gpus + largest)
    assert all(taken(plan.adapters) <= most for plan in plans)
    for plan in plans:
        names = [each.name for each in plan.adapters]
        assert len(set(names)) == len(names) > 0


def test_dlora_refuses_an_adapter_larger_than_a_gpu() -> None:
    with pytest.raises(PlanError, match=r"'0' \(rank 8\) is larger than a GPU"):
        dlora(memory=7).pack(FOUR_ADAPTERS, 2)


@pytest.mark.parametrize("packer", [dlora(), RandomPacking(seed=0)], ids=["dlora", "random"])
def test_the_least_gpus_of_a_packer_without_a_judge_are_judged(packer: Packer) -> None:
    judge = CapacityJudge(capacity_tok_s=650, cost_of_slot=0, cost_of_waiting=0)
    plans = least_gpus(Judged(packer=packer, judge=judge), FOUR_ADAPTERS, 8)
    assert not any(judge.judge(each.adapters, each.num_slots).is_starved for each in plans)
    assert len(plans) >= 2
    with pytest.raises(NotEnoughGpusError, match=r"GPUs \(1\): one starves"):
        Judged(packer=packer, judge=judge).pack(FOUR_ADAPTERS, 1)


PACKERS: list[Packer] = [
    MaxBase(base_tok_s=1000),
    LeastRate(judge=CapacityJudge(capacity_tok_s=1e9)),
    RandomPacking(seed=0),
    DLoraPacking(memory=1000, memory_of_rank=lambda rank: rank),
]


@pytest.mark.parametrize("packer", PACKERS, ids=lambda each: type(each).__name__)
def test_no_gpus_are_refused_and_no_adapters_need_none(packer: Packer) -> None:
    with pytest.raises(PlanError, match="give at least one"):
        packer.pack(FOUR_ADAPTERS, 0)
    assert packer.pack(demand_of(), 2) == ()


@given(demands(30), st.sampled_from(PACKERS[:3]), st.integers(1, 30))
def test_every_adapter_is_placed_once(demand: Demand, packer: Packer, num_gpus: int) -> None:
    try:
        plans = packer.pack(demand, num_gpus)
    except NotEnoughGpusError:
        return
    check_holds_once(plans, demand, num_gpus)


@given(demands(30), judges(), st.integers(1, 30), st.booleans())
def test_least_rate_never_exceeds_the_judge(
    demand: Demand, judge: CapacityJudge, num_gpus: int, has_slots: bool
) -> None:
    try:
        plans = LeastRate(judge=judge, has_slots=has_slots).pack(demand, num_gpus)
    except PlanError:
        return
    assert len(judge.calls) == len(plans)
    check_holds_once(plans, demand, num_gpus)
    assert not any(judge.judge(each.adapters, each.num_slots).is_starved for each in plans)
