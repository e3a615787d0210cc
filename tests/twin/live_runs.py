"""Runs of live engines, and of twins that are given the times of these runs."""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from loraplex.core.clock import ManualClock
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.core import Engine
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.host_kv import HostKV
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.plan import AdapterLoad, AdapterRead, BlockCopy, StepPlan
from loraplex.twin.ahead import AheadSimulator
from loraplex.twin.kv_copies import KVCopies
from loraplex.twin.outcome import Outcome
from loraplex.twin.simulator import Simulator
from loraplex.workload.jsonl import WorkloadRequest

TICK_S = 2.0**-20
"""Times are whole numbers of it: sums and differences of them are exact."""


@dataclass(frozen=True)
class Traffic:
    """`within_s`: seconds in which all requests arrive. `hot`: share of them on the first adapter, beside its
    part of the others."""

    num_requests: int = 40
    within_s: float = 0.4
    most_prompt: int = 90
    most_output: int = 40
    hot: float = 0.0


USUAL = Traffic()


class Decision(NamedTuple):
    """A plan as far as live engine and twin have to agree; without `merge`, nothing is merged."""

    chunks: list[tuple[str, int, int, bool]]
    loads: list[str]
    evictions: list[str]
    preempted: list[str]
    swap_outs: list[BlockCopy]
    swap_ins: list[BlockCopy]
    merge: tuple[str | None, str] | None


@dataclass
class Recording:
    """The inputs, decisions and times of a live engine. `begins_s`: when each plan was decided, and the end
    of the run. `swap_ends_s`: when each plan's copies to the host (True), and to the device, ended."""

    arrivals: list[WorkloadRequest] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    begins_s: list[float] = field(default_factory=list)
    load_ends_s: dict[str, deque[float]] = field(default_factory=dict)
    swap_ends_s: dict[bool, deque[float]] = field(default_factory=lambda: {True: deque(), False: deque()})

    def steps_s(self, *, runs_ahead: bool) -> deque[float]:
        """Return the seconds of each step that computed something. An engine that runs ahead lands a step
        after it has launched the next one."""
        lasts_s = [end_s - begin_s for begin_s, end_s in pairwise(self.begins_s)]
        return deque(lasts_s[number + runs_ahead] for number, plan in enumerate(self.plans) if plan.chunks)


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
    """Loads and copies of KV blocks end when they did."""

    recording: Recording

    def _start_loads(self, reads: Sequence[AdapterRead], loads: Sequence[AdapterLoad]) -> None:
        assert not reads
        for load in loads:
            end_s = self.recording.load_ends_s[load.version].popleft()
            heapq.heappush(self._ends, (end_s, next(self._order), load.version, False))

    def _start_swaps(self, plan: StepPlan) -> None:
        for copies, out in ((plan.swap_outs, True), (plan.swap_ins, False)):
            if copies:
                self._kv_copies.begin(KVCopies(self.recording.swap_ends_s[out].popleft(), copies, out))


class ReplayingAheadSimulator(ReplayingSimulator, AheadSimulator):
    """The same for an engine that runs ahead."""


def run_live(engine: Engine, versions: list[str], traffic: Traffic, clock: ManualClock) -> Recording:
    """`clock`: shows the time of the current step. It stands still while an engine that runs ahead launches a
    step on an idle device: it decides the next one at once."""
    rng = random.Random(5)
    recording = Recording()
    due = sorted(rng.uniform(0.0, traffic.within_s) for _ in range(traffic.num_requests))
    sizes = [
        (rng.randint(1, traffic.most_prompt), rng.randint(1, traffic.most_output), rng.randrange(5))
        for _ in due
    ]
    sizes = [
        (prompt, output, 0 if rng.random() < traffic.hot else adapter) for prompt, output, adapter in sizes
    ]
    _record(engine, recording, clock)
    start_s, number, landed = time.perf_counter(), 0, engine.landed
    while number < len(due) or engine.has_work():
        if not engine._flights or engine.landed is not landed:
            clock.advance(int((time.perf_counter() - start_s) / TICK_S) * TICK_S - clock.now_s())
        landed = engine.landed
        while number < len(due) and due[number] <= clock.now_s():
            prompt, output, adapter = sizes[number]
            recording.arrivals.append(
                WorkloadRequest(
                    arrival_s=clock.now_s(), prompt_tokens=prompt, output_tokens=output, adapter=adapter
                )
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
        engine.step()
    recording.begins_s.append(recording.begins_s[-1] + TICK_S)
    return recording


def _record(engine: Engine, recording: Recording, clock: ManualClock) -> None:
    """Record what an engine decides from now on. What ends after a decision counts from the next one on."""
    scheduler, collect = engine._scheduler, engine._collect_loads
    decide, loaded, swapped = scheduler.schedule, scheduler.adapter_loaded, scheduler.swap_ended
    ended: list[deque[float]] = []

    def schedule() -> StepPlan:
        for ends_s in ended:
            ends_s.append(clock.now_s())
        ended.clear()
        recording.begins_s.append(clock.now_s())
        recording.plans.append(decide())
        return recording.plans[-1]

    def adapter_loaded(version: str) -> None:
        ended.append(recording.load_ends_s.setdefault(version, deque()))
        loaded(version)

    def swap_ended(copies: Iterable[BlockCopy], *, out: bool, error: str | None = None) -> None:
        ended.append(recording.swap_ends_s[out])
        swapped(copies, out=out, error=error)

    def collect_loads(timeout_s: float) -> set[str]:
        is_new = not recording.begins_s or clock.now_s() > recording.begins_s[-1]
        return collect(timeout_s) if is_new or not engine._flights else set()

    engine._collect_loads = collect_loads  # type: ignore[method-assign]
    scheduler.schedule = schedule  # type: ignore[method-assign]
    scheduler.adapter_loaded = adapter_loaded  # type: ignore[method-assign]
    scheduler.swap_ended = swap_ended  # type: ignore[method-assign]


def decisions(plans: Sequence[StepPlan]) -> list[Decision]:
    """Return the decisions of steps that decide something."""
    found = []
    for plan in plans:
        decision = Decision(
            chunks=[(c.request_id, c.start, c.num_tokens, c.samples) for c in plan.chunks],
            loads=[load.version for load in plan.adapter_loads],
            evictions=[*plan.adapter_evictions],
            preempted=[*plan.preempted],
            swap_outs=[*plan.swap_outs],
            swap_ins=[*plan.swap_ins],
            merge=None if plan.merged is None else (plan.merge, plan.merged),
        )
        if any(decision):
            found.append(decision)
    return found


class BothRuns(NamedTuple):
    """The decisions of a live run, those of the twin that is given its times, and the twin's outcome."""

    live: list[Decision]
    replayed: list[Decision]
    outcome: Outcome


def run_both(
    engine: Engine,
    versions: list[str],
    traffic: Traffic = USUAL,
    *,
    runs_ahead: bool = False,
    clock: ManualClock | None = None,
) -> BothRuns:
    recording = run_live(engine, versions, traffic, clock or ManualClock())
    memory, costs = engine._scheduler._memory, engine._scheduler.fair.costs._costs
    assert costs is not None
    assert isinstance(memory, SeparateMemory)
    host = memory.pool.host
    twin = (ReplayingAheadSimulator if runs_ahead else ReplayingSimulator)(
        config=engine._scheduler._config,
        memory=SeparateMemory(
            num_blocks=memory.pool.num_blocks,
            block_size=memory.pool.block_size,
            adapter_bytes=memory.table.serving.room.budget_bytes,
            host_kv=None if host is None else HostKV(host.num_blocks, host.block_bytes),
        ),
        times=RecordedTimes(recording.steps_s(runs_ahead=runs_ahead)),  # type: ignore[arg-type]
        adapters=versions,
        leaps=False,
        costs=DriftWatch(costs.model),
    )
    twin.recording = recording
    twin.plans = []
    for version in versions:
        twin.scheduler.adapters.add(version, memory.table.num_bytes(version))
        if version in engine._scheduler.batcher.merged._bytes:
            twin.scheduler.batcher.merged.know(version, engine._scheduler.batcher.merged._bytes[version])
    outcome = twin.run(recording.arrivals)
    engine.close()

    assert outcome.summary()["num_served"] == traffic.num_requests
    return BothRuns(decisions(recording.plans), decisions(twin.plans), outcome)
