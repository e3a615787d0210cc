"""One engine of the twin with a candidate's victims, queue, admission and start policy
(`benchmarks.policies`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from benchmarks.policy_loads import RANKS, Load, Requests
from benchmarks.policy_queues import Admission, Order, QuickTrialScheduler, TrialScheduler
from benchmarks.policy_starts import Starts
from benchmarks.policy_victims import Victims
from loraplex.core.cold_start import ColdStart
from loraplex.core.modules import MODULES
from loraplex.core.request import EngineRequest
from loraplex.perf.cost_model import CostModel, with_copies_at_most
from loraplex.perf.drift import DriftWatch
from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.victims import IdleAdapter
from loraplex.scheduling.work import StepWork
from loraplex.twin.ahead import AheadSimulator
from loraplex.twin.counted_blocks import CountedPool
from loraplex.twin.engine_twin import AdapterEvent
from loraplex.twin.outcome import Outcome, RequestEvent
from loraplex.twin.paused_collector import paused_collector
from loraplex.twin.slo import Slo
from loraplex.twin.times import CostModelTimes

SLO: Final = Slo(ttft_s=0.5, tpot_s=0.05)
_FULL_PROMPT: Final = 1024


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy in place of the shipped one; None: as shipped. `needs_blocks`: it differs from that only where
    blocks are cached."""

    name: str
    kind: str
    victims: Victims | None = None
    queue: Callable[[AdapterTable], Order] | None = None
    admission: Admission | None = None
    starts: Starts | None = None
    needs_blocks: bool = False


class DiskTimes(CostModelTimes):
    """Files come from the disk, not from the page cache: a host that keeps half of the adapters in its memory
    has no other half for their files."""

    def __init__(self, model: CostModel, adapter_bytes: dict[str, int]) -> None:
        super().__init__(model, adapter_bytes)
        self._disk = model.disk

    def read_s(self, version: str) -> float:
        return self._disk.seconds(self._bytes(version))


class TrialSimulator(AheadSimulator):
    """An engine on a GPU, with a candidate's parts."""

    def __init__(self, candidate: Candidate, prompts: Sequence[list[int]] | None, **options: Any) -> None:
        super().__init__(**options)
        self._prompts = prompts
        if candidate.queue is not None or candidate.admission is not None:
            self._schedule_by(candidate, options)
        if candidate.starts is not None:
            self.scheduler.adapters.pins.starts = candidate.starts(options["costs"])

    def _schedule_by(self, candidate: Candidate, options: dict[str, Any]) -> None:
        kind = TrialScheduler if self._memory.pool.keeps_contents else QuickTrialScheduler
        scheduler = kind(options["config"], self._memory, options["costs"], self._times.adapter_weight)
        scheduler.admit_by(candidate.queue, candidate.admission)
        self.scheduler = scheduler

    def _take(self, request: EngineRequest) -> None:
        if self._prompts is not None:
            request = replace(request, prompt_token_ids=self._prompts[int(request.request_id)])
        super()._take(request)


def run(profile: CostModel, load: Load, drawn: Requests, candidate: Candidate) -> dict[str, float]:
    """Return the figures of one run."""
    assert profile.memory is not None
    versions = [f"adapter-{number}" for number in range(load.num_adapters)]
    sizes = {
        version: profile.memory.adapter_bytes(RANKS[number % len(RANKS)], MODULES)
        for number, version in enumerate(versions)
    }
    simulator = _engine(profile, load, drawn, candidate, sizes)
    for version, num_bytes in sizes.items():
        simulator.scheduler.adapters.add(version, num_bytes)
    requests: list[RequestEvent] = []
    adapters: list[AdapterEvent] = []
    with paused_collector():
        simulator.stage_all()
        simulator.watch(requests, adapters)
        outcome = simulator.run(drawn.requests)
    return _figures(load, outcome, adapters, simulator)


def _engine(
    profile: CostModel, load: Load, drawn: Requests, candidate: Candidate, sizes: dict[str, int]
) -> TrialSimulator:
    if load.gb_per_s is not None:
        profile = with_copies_at_most(profile, load.gb_per_s * 1e9)
    has = profile.memory
    assert has is not None
    all_bytes, page_bytes = sum(sizes.values()), has.token_bytes * has.block_tokens
    pool: type[BlockPool] = CountedPool if drawn.prompts is None else BlockPool
    memory = Arena(
        num_pages=load.kv_tokens // has.block_tokens + int(all_bytes * load.resident) // page_bytes,
        page_bytes=page_bytes,
        block_size=has.block_tokens,
        host_bytes=int(all_bytes * load.staged),
        pool=pool,
    )
    times = DiskTimes(profile, sizes)

    def reload_s(adapter: IdleAdapter) -> float:
        copy_s = profile.copy_s(adapter.num_bytes)
        return copy_s if adapter.reloads_from_host else copy_s + profile.disk.seconds(adapter.num_bytes)

    if candidate.victims is not None:
        prompt = StepFeatures(num_prompts=1, num_prompt_tokens=_FULL_PROMPT)
        candidate.victims(memory, reload_s, profile.step_s(prompt) / _FULL_PROMPT / has.token_bytes)
    config = SchedulerConfig(
        max_model_len=has.max_context,
        work=StepWork(max_tokens=has.step_tokens, position_cost=has.position_cost),
        cold_start=ColdStart.AUTO,
    )
    return TrialSimulator(
        candidate,
        drawn.prompts,
        config=config,
        memory=memory,
        times=times,
        adapters=list(sizes),
        costs=DriftWatch(profile),
    )


def _figures(
    load: Load, outcome: Outcome, adapters: list[AdapterEvent], simulator: TrialSimulator
) -> dict[str, float]:
    counted = [each for each in outcome.requests if each.request.arrival_s >= load.warm_s]
    waits_s = np.array([each.ttft_s for each in counted if each.ttft_s is not None])
    stays_s = np.array(
        [each.finish_s - each.request.arrival_s for each in counted if each.finish_s is not None]
    )
    num_tokens = sum(each.request.output_tokens for each in outcome.requests if each.is_served)
    pool = simulator.scheduler.stats(0)
    return {
        "num_requests": len(counted),
        "num_failed": sum(each.failed for each in outcome.requests),
        "ttft_mean_s": float(waits_s.mean()),
        "ttft_p99_s": float(np.percentile(waits_s, 99)),
        "e2e_mean_s": float(stays_s.mean()),
        "output_tok_s": num_tokens / outcome.duration_s,
        "slo_attainment": sum(map(SLO.is_attained, counted)) / len(counted),
        "disk_reads": sum(each.kind == "read" for each in adapters),
        "device_loads": sum(each.kind == "load" for each in adapters),
        "num_preemptions": outcome.num_preemptions,
        "prefix_hits": pool.prefix_cache_hits / max(pool.prefix_cache_queries, 1),
    }
