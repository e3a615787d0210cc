"""The script that holds the twin against our engine: both get the same requests, and the pace is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import pace, twin_engine, twin_loads
from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine
from loraplex.core.modules import MODULES
from loraplex.engine.profile_subject import subject_of
from loraplex.model.shapes import config_of_shape
from loraplex.perf.cost_model import CostModel
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.engine_memory import EngineMemory
from loraplex.workload.jsonl import WorkloadRequest

SETTING = replace(twin_loads.SETTINGS["cpu"], duration_s=0.3, num_adapters=3)


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> CostModel:
    monkeypatch.setattr(twin_loads, "_LARGEST_SIZE", 12)
    monkeypatch.setattr(twin_engine, "_WARM_UP_S", 0.05)
    monkeypatch.setattr(pace, "LOOK_EVERY_S", 0.05)
    shape = config_of_shape("tiny").shape
    subject = subject_of(shape, "cpu", torch.float32)
    memory = EngineMemory(
        max_context=512,
        token_bytes=512,
        block_tokens=16,
        arena_bytes=None,
        kv_tokens=8192,
        host_bytes=1 << 30,
        table_bytes=0,
        rank_bytes=dict.fromkeys(MODULES, 1 << 10),
    )
    return replace(default_cost_model(subject, shape, num_cores=2), memory=memory)


@pytest.mark.slow
def test_a_workload_is_served_by_both(profile: CostModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin_engine, "LOADS", (1.0,))
    [found] = twin_engine.measure(SETTING, [profile])
    [each] = found["workloads"]
    assert each["num_requests"] > 0
    assert each["live"].keys() == each["twin"].keys() == each["smape"].keys()
    assert all(value > 0 for side in ("live", "twin") for value in each[side].values())
    assert each["pace"]["at_s"][0] == 0.0
    assert all(ratio > 0 for ratio in each["pace"]["times_the_profile"])
    assert each["not_told_the_pace"]["smape"].keys() == each["smape"].keys()


@pytest.mark.slow
def test_every_round_has_other_requests_and_loads_are_of_the_machine_at_its_pace(
    profile: CostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin_engine, "LOADS", (0.5, 1.0))
    monkeypatch.setattr(twin_engine, "served_per_s", lambda *args: 100.0)
    monkeypatch.setattr(pace.Pace, "_take_steps", lambda self: 2.0)
    asked: list[tuple[float, int]] = []

    def watched(setting: twin_loads.Setting, per_s: float, seed: int) -> Iterator[WorkloadRequest]:
        asked.append((per_s, seed))
        return twin_loads.requests(setting, per_s, seed)

    monkeypatch.setattr(twin_engine, "warm_up", lambda *args: None)
    monkeypatch.setattr(twin_engine, "requests", watched)
    rounds = twin_engine.measure(SETTING, [profile, profile])
    assert [per_s for per_s, _ in asked] == [25.0, 50.0] * 2
    assert len({seed for _, seed in asked}) == 4
    assert [each["requests_per_s"] for found in rounds for each in found["workloads"]] == [25.0, 50.0] * 2


@pytest.mark.slow
def test_the_pace_is_of_the_moment_and_looks_take_no_time_of_the_replay(
    profile: CostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = pace.Pace(SETTING, profile)
    ratios, now_s = iter([1.0] * 6 + [3.0] * 6), 100.0

    def take_steps() -> float:
        nonlocal now_s
        now_s += 0.5
        return next(ratios)

    monkeypatch.setattr(seen, "_take_steps", take_steps)
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: now_s))
    paused_s = 0.0
    for _ in range(12):
        paused_s += seen.look()
        assert seen.look() == 0.0, "it was just now"
        now_s += 1.0
    assert paused_s == 12 * 0.5
    assert seen.at(0.0) == 1.0
    assert seen.at(12.0) == 3.0
    assert seen.figures() == {"at_s": list(range(12)), "times_the_profile": [1.0] * 6 + [3.0] * 6}
    seen.close()


def test_a_machine_that_is_slower_takes_so_much_longer(profile: CostModel) -> None:
    class Slower:
        def at(self, moment_s: float) -> float:
            return 2.0

    engine = build_random_engine(RandomEngineOptions(shape="tiny", device="cpu", dtype=torch.float32))
    # All at once: the last ends when all steps are done, and no arrival is waited for.
    workload = [
        replace(each, arrival_s=0.0)
        for each in twin_loads.requests(replace(SETTING, duration_s=1.0), 40.0, seed=1)
    ]
    usual = twin_engine.run_twin(engine, SETTING, profile, workload)
    slower = twin_engine.run_twin(engine, SETTING, profile, workload, Slower())  # type: ignore[arg-type]
    engine.close()
    assert slower.num_steps == usual.num_steps
    assert slower.duration_s == pytest.approx(2 * usual.duration_s)
