"""Our own engine's GPUs, judged by their steady state: as the twin finds them, within a few percent."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.judge import Verdict
from loraplex.planner.packing.max_pack import MaxPack
from loraplex.planner.plan import GpuPlan
from loraplex.planner.steady_state import MARGIN, SteadyStateJudge
from loraplex.planner.trial import run_gpu


def own_profile() -> CostModel:
    profile = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(profile, CostModel)
    return profile


def demand(ranks: tuple[int, ...], total_rps: float) -> Demand:
    adapters = tuple(
        AdapterDemand(name=f"a-{number}", rank=rank, rate_rps=total_rps / len(ranks))
        for number, rank in enumerate(ranks)
    )
    return Demand(adapters=adapters, prompt_tokens=100.0, output_tokens=60.0)


@pytest.mark.parametrize("ranks", [(8,) * 4, (8, 16, 64, 128) * 10])
def test_a_full_gpu_serves_what_the_twin_says(ranks: tuple[int, ...]) -> None:
    asked = demand(ranks, 250.0)
    found = SteadyStateJudge(own_profile(), asked).judge(asked.adapters, None)
    simulated = run_gpu(
        own_profile(), asked, GpuPlan(adapters=asked.adapters, num_slots=None), duration_s=10, seed=1
    )
    assert simulated.is_starved
    assert found.is_starved
    assert found.throughput_tok_s / MARGIN == pytest.approx(simulated.served_tok_s, rel=0.05)


def test_what_a_gpu_can_serve_is_served() -> None:
    asked = demand((16,) * 10, 1.0)
    found = SteadyStateJudge(own_profile(), asked).judge(asked.adapters, None)
    assert not found.is_starved
    assert found.throughput_tok_s == pytest.approx(160.0, rel=0.05)


def test_larger_and_more_adapters_cost_more() -> None:
    def most_tok_s(ranks: tuple[int, ...]) -> float:
        asked = demand(ranks, 1e4)
        return SteadyStateJudge(own_profile(), asked).judge(asked.adapters, None).throughput_tok_s

    assert most_tok_s((8,) * 50) > most_tok_s((64,) * 50) > most_tok_s((64,) * 200)


def test_adapters_too_large_for_the_memory_starve() -> None:
    asked = demand((100_000,), 0.1)
    found = SteadyStateJudge(own_profile(), asked).judge(asked.adapters, None)
    assert found == Verdict(0.0, True)


def test_no_adapters_ask_for_nothing() -> None:
    assert SteadyStateJudge(own_profile(), demand((8,), 1.0)).judge([], None) == Verdict(0.0, False)


def test_a_gpu_without_slots_gets_as_many_as_it_serves_and_not_one_more() -> None:
    asked = demand((64,) * 200, 1000.0)
    judge = SteadyStateJudge(own_profile(), asked)
    plans = MaxPack(judge=judge, has_slots=False).pack(asked, 100)
    assert sorted(each.name for plan in plans for each in plan.adapters) == sorted(
        each.name for each in asked.adapters
    )
    for plan, following in pairwise(plans):
        assert not judge.judge(plan.adapters, None).is_starved
        assert judge.judge([*plan.adapters, following.adapters[0]], None).is_starved
