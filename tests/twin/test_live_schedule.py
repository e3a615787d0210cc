"""Fed with the times that a live engine took, the twin decides what that engine decided, step by step."""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cheap_merges import costs_that_merge
from tiny import save_adapter, save_model

from loraplex.adapters.peft_reader import read_adapter
from loraplex.core.batching import Batching
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine import cpu_build
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.options import EngineOptions
from loraplex.model.config import load_config
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.plan import AdapterLoad, AdapterRead, StepPlan
from loraplex.twin.simulator import Simulator
from loraplex.workload.jsonl import WorkloadRequest

TICK_S = 2.0**-20
"""Times are whole numbers of it: sums and differences of them are exact."""
NUM_REQUESTS = 40


@dataclass
class Recording:
    """The inputs, decisions and times of a live engine."""

    arrivals: list[WorkloadRequest] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    steps_s: deque[float] = field(default_factory=deque)
    load_ends_s: dict[str, deque[float]] = field(default_factory=dict)


class RecordedTimes:
    def __init__(self, steps_s: deque[float]) -> None:
        self._steps_s = steps_s

    def step_s(self, plan: StepPlan, num_waiting: int) -> float:
        return self._steps_s.popleft()

    def adapter_weight(self, version: str) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not recorded")


class ReplayingSimulator(Simulator):
    """Loads end when they did."""

    load_ends_s: dict[str, deque[float]]

    def _start_loads(self, reads: Sequence[AdapterRead], loads: Sequence[AdapterLoad]) -> None:
        assert not reads
        for load in loads:
            end_s = self.load_ends_s[load.version].popleft()
            heapq.heappush(self._ends, (end_s, next(self._order), load.version, False))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("base")
    return folder, save_model(folder)


def live_engine(
    base: tuple[Path, Any],
    folder: Path,
    batching: Batching = Batching.FCFS,
    adapter_bytes: int = 100 << 10,
    kv_bytes: int = 120 << 10,
) -> tuple[Engine, list[str]]:
    """Memory for a few requests at a time, and by default for two to four adapters of five, whose victims are
    chosen by what reloads cost."""
    shape = load_config(base[0]).shape
    options = EngineOptions(
        model=str(base[0]),
        kv_memory_bytes=kv_bytes,
        host_adapter_memory_bytes=adapter_bytes,
        max_step_tokens=48,
        max_running=256 if batching is Batching.FCFS else 4,
        batching=batching,
    )
    engine = build_core(options)
    versions = []
    for number, rank in enumerate((4, 8, 6, 4, 2)):
        path = folder / f"adapter-{number}"
        save_adapter(path, base[1], rank=rank, seed=number)
        spec = read_adapter(path, shape)
        engine.add_adapter(spec)
        versions.append(spec.version)
    return engine, versions


def run_live(engine: Engine, versions: list[str], hot: float) -> Recording:
    rng = random.Random(5)
    recording = Recording()
    due = sorted(rng.uniform(0.0, 0.4) for _ in range(NUM_REQUESTS))
    sizes = [(rng.randint(1, 90), rng.randint(1, 40), rng.randrange(5)) for _ in due]
    sizes = [(prompt, output, 0 if rng.random() < hot else adapter) for prompt, output, adapter in sizes]
    scheduler, decide, reported = engine._scheduler, engine._scheduler.schedule, list[str]()
    now_s = 0.0

    def schedule() -> StepPlan:
        for version in reported:
            recording.load_ends_s.setdefault(version, deque()).append(now_s)
        reported.clear()
        recording.plans.append(decide())
        return recording.plans[-1]

    told = scheduler.adapter_loaded
    scheduler.schedule = schedule  # type: ignore[method-assign]
    scheduler.adapter_loaded = lambda version: (reported.append(version), told(version))[1]  # type: ignore[method-assign]
    start_s, number, was_busy = time.perf_counter(), 0, False
    while number < NUM_REQUESTS or engine.has_work():
        before_s, now_s = now_s, int((time.perf_counter() - start_s) / TICK_S) * TICK_S
        if was_busy:
            recording.steps_s.append(now_s - before_s)
        while number < NUM_REQUESTS and due[number] <= now_s:
            prompt, output, adapter = sizes[number]
            recording.arrivals.append(
                WorkloadRequest(arrival_s=now_s, prompt_tokens=prompt, output_tokens=output, adapter=adapter)
            )
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            engine.add_request(
                EngineRequest(
                    request_id=str(number),
                    prompt_token_ids=[number] * prompt,
                    params=params,
                    adapter=versions[adapter],
                )
            )
            number += 1
        num_plans = len(recording.plans)
        engine.step()
        was_busy = any(plan.chunks for plan in recording.plans[num_plans:])
    if was_busy:
        recording.steps_s.append(TICK_S)
    return recording


def decisions(plans: Sequence[StepPlan]) -> list[Any]:
    """Return the decisions of steps that decide something."""
    found = []
    for plan in plans:
        chunks = [(c.request_id, c.start, c.num_tokens, c.samples) for c in plan.chunks]
        loads = [load.version for load in plan.adapter_loads]
        what = (chunks, loads, list(plan.adapter_evictions), list(plan.preempted))
        if plan.merged is not None:
            what = (*what, (plan.merge, plan.merged))
        if any(what):
            found.append(what)
    return found


def test_the_twin_decides_what_the_live_engine_decided(base: tuple[Path, Any], tmp_path: Path) -> None:
    engine, versions = live_engine(base, tmp_path)
    live, replayed = run_both(engine, versions)
    assert replayed == live
    # What the run has to show, or the test shows little.
    assert sum(len(preempted) for _, _, _, preempted in live) > 0
    assert sum(len(loads) for _, loads, _, _ in live) > 5


@pytest.mark.parametrize(
    "batching",
    [
        Batching.AUTO,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in Batching
            if each not in (Batching.FCFS, Batching.AUTO)
        ),
    ],
)
def test_the_twin_decides_the_same_under_every_batching_policy(
    base: tuple[Path, Any], tmp_path: Path, batching: Batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured times would correct the live engine's predictions, which the twin does not measure."""
    monkeypatch.setattr(DriftWatch, "observe", lambda *_, **__: False)
    engine, versions = live_engine(base, tmp_path, batching, adapter_bytes=2 << 20)
    live, replayed = run_both(engine, versions)
    assert replayed == live
    are_merged = any(len(what) > 4 for what in live)
    assert are_merged or batching is not Batching.MERGED
    assert batching.merges or not are_merged


def test_the_twin_pauses_the_same_requests_for_a_hot_adapter(
    base: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DriftWatch, "observe", lambda *_, **__: False)
    monkeypatch.setattr(cpu_build, "known_costs", costs_that_merge)
    engine, versions = live_engine(base, tmp_path, Batching.AUTO, adapter_bytes=2 << 20, kv_bytes=1 << 20)
    live, replayed = run_both(engine, versions, hot=0.8)
    assert replayed == live
    assert any(len(what) > 4 for what in live), "nothing was merged"
    assert engine.stats().num_pauses > 0, "nothing was paused"


def run_both(engine: Engine, versions: list[str], hot: float = 0.0) -> tuple[list[Any], list[Any]]:
    """Return the decisions of a live run, and those of the twin that is given its times. `hot`: share of the
    requests on the first adapter, beside its part of the others."""
    recording = run_live(engine, versions, hot)
    memory, costs = engine._scheduler._memory, engine._scheduler.fair.costs._costs
    assert costs is not None
    assert isinstance(memory, SeparateMemory)
    twin = ReplayingSimulator(
        config=engine._scheduler._config,
        memory=SeparateMemory(
            num_blocks=memory.pool.num_blocks,
            block_size=memory.pool.block_size,
            adapter_bytes=memory.table.serving.room.budget_bytes,
        ),
        times=RecordedTimes(recording.steps_s),
        adapters=versions,
        leaps=False,
        costs=DriftWatch(costs.model),
    )
    twin.load_ends_s = recording.load_ends_s
    twin.plans = []
    for version in versions:
        twin.scheduler.adapters.add(version, memory.table.num_bytes(version))
        if version in engine._scheduler.batcher.merged._bytes:
            twin.scheduler.batcher.merged.know(version, engine._scheduler.batcher.merged._bytes[version])
    outcome = twin.run(recording.arrivals)
    engine.close()

    assert outcome.summary()["num_served"] == NUM_REQUESTS
    return decisions(recording.plans), decisions(twin.plans)
