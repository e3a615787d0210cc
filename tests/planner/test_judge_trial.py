"""The twin as a judge: for how long it simulates what packers try."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import slot_profile

from loraplex.perf.named_profiles import find_profile
from loraplex.planner import trial
from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.plan import GpuPlan
from loraplex.planner.trial import TwinJudge, judged_s, most_of_base_model, run_gpu
from loraplex.twin.outcome import Outcome


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


def test_the_base_model_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trial._most_of.cache_clear()
    runs: list[object] = []
    replay = trial.replay

    def noted(*args: Any) -> Outcome:
        runs.append(args)
        return replay(*args)

    monkeypatch.setattr(trial, "replay", noted)
    monkeypatch.setattr(trial, "_OVERLOAD_S", 1.0)
    demand = Demand(adapters=(), prompt_tokens=20.0, output_tokens=5.0)
    one = AdapterDemand(name="one", rank=8, rate_rps=1.0)
    profile = slot_profile()
    found = most_of_base_model(profile, demand)
    assert most_of_base_model(slot_profile(), replace(demand, adapters=(one,))) == found
    assert len(runs) == 1
    assert most_of_base_model(profile, replace(demand, output_tokens=6.0)) != found
    assert most_of_base_model(replace(profile, max_running=1), demand) < found
    assert len(runs) == 3
    assert trial._most_of.cache_info().currsize == 1, "no more profiles are kept than a plan is made with"
