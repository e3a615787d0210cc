"""Plans leave room for more requests than are asked for, and keep the rates that are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loraplex.perf.named_profiles import Profile, find_profile
from loraplex.planner.check import check_plan
from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.judge import Verdict
from loraplex.planner.make import make_plan
from loraplex.planner.objectives import Objective
from loraplex.planner.plan import GpuPlan, Plan

SLOTS, OURS = (Path(name) for name in ("vllm-h100-llama-3.1-8b", "h200-llama-2-7b"))


class TenRequests:
    """Any GPU serves ten requests per second."""

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        rate_rps = sum(each.rate_rps for each in adapters)
        return Verdict(min(rate_rps, 10.0), rate_rps > 10.0)

    def fits(self, max_rank: int, num_slots: int) -> bool:
        return True


def demand(count: int, rate_rps: float, rank: int = 8) -> Demand:
    adapters = tuple(
        AdapterDemand(name=f"a{number}", rank=rank, rate_rps=rate_rps) for number in range(count)
    )
    return Demand(adapters=adapters, prompt_tokens=50.0, output_tokens=20.0)


def profile(path: Path) -> Profile:
    return find_profile(path)


def planned(asked: Demand, path: Path = SLOTS, **options: object) -> Plan:
    return make_plan(
        asked,
        profile(path),
        profile_name=str(path),
        packer="max-pack",
        num_gpus=None,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("headroom", [None, 0.0, 0.5, 1.0])
def test_gpus_are_filled_up_to_the_room(headroom: float | None) -> None:
    asked = demand(64, 0.625)
    gpus = planned(asked, judge=TenRequests(), headroom=headroom).gpus
    assert sorted(each.name for gpu in gpus for each in gpu.adapters) == sorted(
        each.name for each in asked.adapters
    )
    assert all(each.rate_rps == 0.625 for gpu in gpus for each in gpu.adapters), "rates are as asked for"
    most = 10.0 / (1.0 + (0.05 if headroom is None else headroom))
    assert all(gpu.rate_rps <= most for gpu in gpus)


def test_the_twin_repairs_what_a_surrogate_planned_too_hopefully(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hopeful(TenRequests):
        def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
            return Verdict(sum(each.rate_rps for each in adapters), False)

    class Twin(TenRequests):
        def __init__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("loraplex.planner.make.TwinJudge", Twin)
    asked = demand(64, 0.625)
    options = {"profile_name": str(SLOTS), "judge": Hopeful(), "headroom": 0.0}
    found = make_plan(asked, profile(SLOTS), packer="improved", num_gpus=None, **options)  # type: ignore[arg-type]
    assert len(found.gpus) >= 4
    assert all(gpu.rate_rps <= 10.0 for gpu in found.gpus)
    with pytest.raises(PlanError, match=r"too few GPUs \(1\): the twin finds some starving"):
        make_plan(asked, profile(SLOTS), packer="improved", num_gpus=1, **options)  # type: ignore[arg-type]


def test_an_error_says_that_rates_are_taken_for_higher() -> None:
    with pytest.raises(PlanError, match=r"rates are taken 100% higher, by --headroom"):
        planned(demand(1, 6.0), judge=TenRequests(), headroom=1.0)


@pytest.mark.slow
def test_the_twin_leaves_room_for_our_own_engine_too() -> None:
    """Only its steady state does so itself, which knows no latency."""
    asked = demand(24, 6.0)
    with_limit = planned(asked, OURS, objective=Objective(ttft_s=5.0))
    assert check_plan(with_limit, profile(OURS), seeds=(1, 2), duration_s=60.0).holds


@pytest.mark.parametrize("path", [SLOTS, OURS])
def test_idle_adapters_that_do_not_fit_are_found(path: Path) -> None:
    """Nobody asks for them, and the GPU cannot start all the same."""
    has_slots = path is SLOTS
    idle = demand(1000, 0.0, rank=32 if has_slots else 512)
    gpu = GpuPlan(adapters=idle.adapters[: 1000 if has_slots else 1], num_slots=1000 if has_slots else None)
    plan = Plan(gpus=(gpu,), profile=str(path), packer="random", prompt_tokens=50.0, output_tokens=20.0)
    assert check_plan(plan, profile(path), seeds=(1,), duration_s=60.0).holds == (not has_slots)


def test_slots_have_room_for_the_ranks_that_vllm_knows() -> None:
    gpu = GpuPlan(adapters=demand(1, 0.1, rank=65).adapters, num_slots=8)
    assert gpu.slot_rank == 128
