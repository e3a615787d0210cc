"""The twin as a judge: for how long it simulates what packers try."""

from __future__ import annotations

from pathlib import Path

from small import slot_profile

from loraplex.perf.named_profiles import find_profile
from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.plan import GpuPlan
from loraplex.planner.trial import TwinJudge, judged_s, run_gpu


def test_a_gpu_of_many_adapters_is_not_judged_by_their_first_loads() -> None:
    """Each of the 400 is read once, which takes three of the first ten minutes; a check takes half an
    hour."""
    adapters = tuple(
        AdapterDemand(name=f"adapter-{number}", rank=32, rate_rps=12.0 / 400) for number in range(400)
    )
    demand = Demand(adapters=adapters, prompt_tokens=223.0, output_tokens=194.2)
    profile, gpu = slot_profile(), GpuPlan(adapters=adapters, num_slots=96)
    assert run_gpu(profile, demand, gpu, duration_s=600.0, seed=0).is_starved
    assert not run_gpu(profile, demand, gpu, duration_s=1800.0, seed=1).is_starved
    assert not TwinJudge(profile, demand).judge(adapters, 96).is_starved


def test_few_requests_are_simulated_for_longer_and_many_for_shorter() -> None:
    slots, ours = slot_profile(), find_profile(Path("h200-llama-2-7b"))
    assert judged_s(10.0, slots, 8) == 600.0
    assert judged_s(2.0, slots, 8) == 1500.0
    assert judged_s(0.0, slots, 500) == 1500.0
    assert judged_s(0.1, slots, 8) == 3600.0
    assert judged_s(10.0, slots, 10_000) == 3600.0
    assert judged_s(1000.0, slots, 500) == 50.0
    assert judged_s(1000.0, ours, 10_000) == 50.0
    assert judged_s(100.0, ours, 10_000) == 60.0
