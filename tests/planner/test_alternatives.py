"""One GPU more, one less, the baselines' plans, and how far predictions may be off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import slot_profile

from loraplex.perf.named_profiles import find_profile
from loraplex.planner.alternatives import alternatives
from loraplex.planner.check import GpuCheck, PlanCheck, check_plan
from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.error_bars import bar_of, profile_error
from loraplex.planner.judge import Verdict
from loraplex.planner.make import make_plan
from loraplex.planner.most_served import flood
from loraplex.planner.objectives import Objective
from loraplex.planner.one_gpu_more import with_one_less, with_one_more
from loraplex.planner.packing.packer import NotEnoughGpusError
from loraplex.planner.plan import GpuPlan, Plan, whole_adapters
from loraplex.planner.plan_file import demand_of
from loraplex.planner.trial import GpuFigures


def gpu(*rates: float, first: int = 0, num_slots: int | None = 8) -> GpuPlan:
    adapters = tuple(
        AdapterDemand(name=str(first + number), rank=8, rate_rps=rate) for number, rate in enumerate(rates)
    )
    return GpuPlan(adapters=adapters, num_slots=num_slots)


def plan_of(*gpus: GpuPlan) -> Plan:
    return Plan(gpus=gpus, profile="p", packer="max-pack", prompt_tokens=60, output_tokens=40)


def rates(plan: Plan) -> list[float]:
    return [round(each.rate_rps, 6) for each in plan.gpus]


def test_one_gpu_more_takes_its_part_from_every_gpu() -> None:
    more = with_one_more(plan_of(gpu(*[1.0] * 12), gpu(*[2.0] * 6, first=12, num_slots=16)))
    assert rates(more) == [8, 8, 8]
    assert more.gpus[-1].num_slots == 16


def test_one_gpu_less_gives_its_adapters_to_the_least_loaded() -> None:
    less = with_one_less(plan_of(gpu(5.0), gpu(1.0, 1.0, first=1), gpu(3.0, first=3)))
    assert rates(less) == [5, 5]


def test_a_copy_of_the_lost_gpu_joins_the_copy_that_is_left() -> None:
    less = with_one_less(plan_of(gpu(2.0), gpu(1.0)))
    assert less.gpus == (gpu(3.0),)


RATES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0]), min_size=1, max_size=12)


@given(st.lists(RATES, min_size=2, max_size=5))
def test_no_adapter_is_lost_and_none_of_its_rate(loads: list[list[float]]) -> None:
    plan = plan_of(*(gpu(*load, first=100 * number) for number, load in enumerate(loads)))
    for other in (with_one_more(plan), with_one_less(plan)):
        before, after = ({each.name: each for each in whole_adapters(every.gpus)} for every in (plan, other))
        assert before == after
    assert len(with_one_less(plan).gpus) == len(loads) - 1


def test_alternatives_are_simulated_and_baselines_get_the_least_gpus_that_will_do() -> None:
    profile = slot_profile()
    plan = plan_of(gpu(*[0.05] * 20), gpu(*[0.05] * 20, first=20))
    found = {each.name: each for each in alternatives(plan, profile)}
    assert list(found) == [
        *("this plan", "one GPU more", "one GPU less", "max-base", "max-base-half", "random", "dlora"),
    ]
    assert {each.checked and each.checked.seeds for each in found.values()} == {(0,)}
    num_gpus = {name: each.checked and len(each.checked.gpus) for name, each in found.items()}
    assert num_gpus["one GPU more"] == 3
    assert num_gpus["one GPU less"] == num_gpus["dlora"] == num_gpus["max-base"] == 1
    assert all(each.checked is not None and each.checked.holds for each in found.values())


class Full:
    """A judge that finds every GPU starving."""

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        return Verdict(1.0, True)

    def fits(self, max_rank: int, num_slots: int) -> bool:
        return True


def test_a_baseline_is_not_tried_with_more_gpus_than_asked_for() -> None:
    demand = demand_of(plan_of(gpu(*[1.0] * 9)))
    with pytest.raises(NotEnoughGpusError, match=r"too few GPUs \(2\)"):
        make_plan(
            demand,
            slot_profile(),
            profile_name="p",
            packer="random",
            num_gpus=None,
            most_gpus=2,
            judge=Full(),
        )


def test_the_most_that_a_gpu_serves_is_asked_of_a_flood() -> None:
    demand = Demand(adapters=(), prompt_tokens=60, output_tokens=40)
    flooded = flood(gpu(1.0, 3.0), demand, base_tok_s=4000)
    assert [each.rate_rps for each in flooded.adapters] == [15, 45]
    assert [each.rate_rps for each in flood(gpu(0.0, 0.0), demand, base_tok_s=4000).adapters] == [30, 30]
    checked = check_plan(
        plan_of(gpu(*[0.05] * 20)), slot_profile(), seeds=(1,), duration_s=60.0, with_most=True
    )
    (loaded,) = checked.gpus
    assert loaded.utilisation is not None
    assert 0 < loaded.utilisation < 0.5


def test_an_error_bar_has_the_spread_of_seeds_and_the_known_error() -> None:
    assert bar_of([10.0], 0.0) == (10, 0)
    assert bar_of([10.0], 0.1) == (10, 1)
    assert bar_of([7.0, 10.0, 13.0], 0.4) == (10, 5)


def test_known_errors_are_those_that_profiles_publish() -> None:
    slots, ours = slot_profile(), find_profile(Path("h200-llama-2-7b"))
    assert profile_error(slots, "ttft_s") == pytest.approx(slots.quality["ttft_s_held_out_smape"] / 100)
    assert 0 < profile_error(ours, "itl_s") < 0.1
    assert profile_error(ours, "served_tok_s") == 0


def test_a_plan_holds_if_no_gpu_starves_and_the_means_over_seeds_are_within_limits() -> None:
    def run(served_tok_s: float, ttft_s: float) -> GpuFigures:
        return GpuFigures(fits=True, offered_tok_s=100.0, served_tok_s=served_tok_s, ttft_s=ttft_s)

    def checked(*runs: GpuFigures) -> PlanCheck:
        of_gpu = GpuCheck(gpu=gpu(1.0), runs=runs, objective=Objective(ttft_s=0.5))
        return PlanCheck(gpus=(of_gpu,), seeds=(1, 2), duration_s=None)

    assert checked(run(95, 0.4), run(95, 0.6)).holds
    slow = checked(run(95, 0.5), run(95, 0.6))
    assert (slow.starves, slow.holds) == (False, False)
    assert slow.gpus[0].missed == ("mean TTFT 550 ms, above 500 ms",)
    assert checked(run(95, 0.4), run(85, 0.4)).starves
