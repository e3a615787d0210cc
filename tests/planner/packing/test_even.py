"""Even divisions: all GPUs alike, and a second start for local improvement that never takes more GPUs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from packing_problems import CapacityJudge, check_good, check_holds_once, demand_of, demands, judges

from loraplex.planner.demand import Demand, PlanError
from loraplex.planner.packing.even import divided, evenly
from loraplex.planner.packing.improve import improve
from loraplex.planner.packing.random_packing import RandomPacking
from loraplex.planner.plan import GpuPlan
from loraplex.planner.queued import Queued


def rate(part: Queued) -> float:
    return sum(each.rate_rps for each in part)


@given(demands(40), st.integers(1, 8))
def test_each_adapter_is_in_one_part_and_parts_differ_by_one_adapter(demand: Demand, num_gpus: int) -> None:
    parts = divided(demand.adapters, num_gpus)
    check_holds_once([GpuPlan(adapters=tuple(each), num_slots=8) for each in parts], demand, num_gpus)
    assert len(parts) == min(num_gpus, len(demand.adapters))
    rates = [rate(each) for each in parts]
    assert rates == sorted(rates, reverse=True)
    if parts:
        # Beside its rate an adapter counts a tenth of the mean: as many as there may be more on a GPU.
        slack = 0.1 * sum(rates) / len(demand.adapters) * max(map(len, parts))
        assert rates[0] - rates[-1] <= max(each.rate_rps for each in demand.adapters) + slack + 1e-9


def test_parts_have_the_same_adapters_of_each_rank() -> None:
    demand = demand_of(*[(rank, rps) for rank in (8, 32) for rps in (2.0, 1.0) for _ in range(6)])
    for part in divided(demand.adapters, 3):
        assert sorted((each.rank, each.rate_rps) for each in part) == [
            (rank, rps) for rank in (8, 32) for rps in (1.0, 1.0, 2.0, 2.0)
        ]


def test_adapters_without_requests_are_spread_too() -> None:
    demand = demand_of((8, 1.0), *[(8, 0.0)] * 30)
    assert sorted(len(each) for each in divided(demand.adapters, 3)) == [1, 15, 15]
    idle = demand_of(*[(8, 0.0)] * 30)
    assert [len(each) for each in divided(idle.adapters, 3)] == [10, 10, 10]


def test_slots_are_the_most_that_cost_no_throughput() -> None:
    demand = demand_of(*[(8, 0.1)] * 100)
    parts = divided(demand.adapters, 1)
    roomy = CapacityJudge(cost_of_slot=0)
    assert [each.num_slots for each in evenly(parts, roomy, 100, has_slots=True) or ()] == [128]
    tight = CapacityJudge(cost_of_slot=0, memory=8 * 40)
    assert [each.num_slots for each in evenly(parts, tight, 100, has_slots=True) or ()] == [32]
    # 128 slots leave 904 of the 2,000 tokens per second, 96 leave 1,176, and 8 make 92 adapters wait.
    costly = CapacityJudge(capacity_tok_s=2000, cost_of_slot=1.07, cost_of_waiting=10)
    assert [each.num_slots for each in evenly(parts, costly, 100, has_slots=True) or ()] == [96]


def test_a_part_that_starves_or_does_not_fit_is_no_plan() -> None:
    parts = divided(demand_of(*[(8, 1.0)] * 24).adapters, 2)
    assert evenly(parts, CapacityJudge(capacity_tok_s=1000), 100, has_slots=True) is None
    assert evenly(parts, CapacityJudge(memory=1), 100, has_slots=True) is None
    assert evenly(parts, CapacityJudge(capacity_tok_s=1000), 100, has_slots=False) is None


def test_an_even_division_takes_fewer_gpus_than_the_plan_that_is_improved() -> None:
    demand = demand_of(*[(8, 0.25)] * 96)
    plans = [GpuPlan(adapters=demand.adapters[number::3], num_slots=8) for number in range(3)]
    judge = CapacityJudge(capacity_tok_s=1500, cost_of_slot=0)
    found = improve(plans, demand, judge, most_judgements=0)
    assert [(len(each.adapters), each.num_slots) for each in found] == [(48, 64), (48, 64)]
    assert improve(plans, demand, judge, most_judgements=0, divides_evenly=False) == tuple(plans)


def test_an_even_division_among_as_many_gpus_lowers_the_highest_rate() -> None:
    """No adapter of rank 32 moves to the GPU of rank 8, so that moves do not."""
    demand = demand_of((32, 3.0), (32, 3.0), (8, 1.0))
    plans = [
        GpuPlan(adapters=demand.adapters[:2], num_slots=8),
        GpuPlan(adapters=demand.adapters[2:], num_slots=8),
    ]
    judge = CapacityJudge(capacity_tok_s=620, cost_of_slot=0, cost_of_waiting=0)
    assert sorted(each.rate_rps for each in improve(plans, demand, judge)) == [3.0, 4.0]


@given(demands(40), judges(), st.integers(0, 3), st.booleans(), st.sampled_from([0, 300]))
def test_even_divisions_never_take_more_gpus(
    demand: Demand, judge: CapacityJudge, seed: int, has_slots: bool, most_judgements: int
) -> None:
    plans = RandomPacking(seed=seed, has_slots=has_slots).pack(demand, 5)
    plans = tuple(replace(each, num_slots=8 if has_slots else None) for each in plans)
    try:
        without = improve(plans, demand, judge, most_judgements=most_judgements, divides_evenly=False)
    except PlanError:
        return
    found = improve(plans, demand, judge, most_judgements=most_judgements)
    assert len(found) <= len(without)
    check_holds_once(found, demand, 40)
    check_good(found, judge, has_slots=has_slots)
