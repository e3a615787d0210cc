"""Small twins for tests, and workloads to run on them."""

from __future__ import annotations

import random
from dataclasses import replace

from slot_times import SlotTimes

from loraplex.core.batching import Batching
from loraplex.core.cold_start import ColdStart
from loraplex.core.modules import MODULES
from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.cost_model import CostModel, with_padded_kernels
from loraplex.perf.drift import DriftWatch
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.layer_pipeline import Bus
from loraplex.perf.line import Line
from loraplex.perf.serving_costs import AdapterLoadCost, BatchDecode, Prefill, SchedulerCost
from loraplex.perf.slot_profile import SlotCosts
from loraplex.perf.step_cost import RowCurve, StepCost, StepTerms
from loraplex.perf.subject import Subject
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.host_kv import HostKV
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.work import StepWork
from loraplex.twin.ahead import AheadSimulator
from loraplex.twin.counted_blocks import CountedPool
from loraplex.twin.simulator import Simulator
from loraplex.twin.times import CostModelTimes
from loraplex.workload.jsonl import WorkloadRequest

COSTS = SlotCosts(
    decode=BatchDecode(
        base_s=10e-3,
        request_s=100e-6,
        adapter_s=300e-6,
        adapter_rank_s=5e-6,
        kv_token_s=1e-6,
        slot_s=20e-6,
        slot_rank_s=1e-6,
        request_rank_s=2e-6,
        request_adapter_s=3e-6,
        request_slot_s=4e-6,
    ),
    prefill=Prefill(base_s=5e-3, token_s=50e-6, adapter_s=400e-6, token_rank_s=1e-6, slot_s=30e-6),
    load=AdapterLoadCost(slot_s=2e-3, slot_rank_s=0.1e-3, disk_s=20e-3, disk_rank_s=1e-3),
    scheduler=SchedulerCost(request_s=1e-6, waiting_s=5e-6),
)

MERGED_BYTES = 1 << 20


def random_workload(
    seed: int, *, num_requests: int = 60, num_adapters: int = 6, rps: float = 20.0
) -> list[WorkloadRequest]:
    rng = random.Random(seed)
    now_s, requests = 0.0, []
    for _ in range(num_requests):
        now_s += rng.expovariate(rps)
        requests.append(
            WorkloadRequest(
                arrival_s=now_s,
                prompt_tokens=rng.randint(1, 120),
                output_tokens=rng.randint(1, 90),
                adapter=rng.randrange(num_adapters),
            )
        )
    return requests


def slot_twin(
    *,
    num_adapters: int = 6,
    num_slots: int = 3,
    num_blocks: int = 60,
    max_running: int = 16,
    max_step_tokens: int = 256,
    leaps: bool = True,
) -> Simulator:
    """An engine with slots; ranks are 8, 16, 24, ..., and it goes through adapters from the last to the
    first."""
    adapters = [f"adapter-{number}" for number in range(num_adapters)]
    memory = SeparateMemory(
        num_blocks=num_blocks, block_size=16, adapter_bytes=num_adapters, pool=CountedPool
    )
    config = SchedulerConfig(
        max_model_len=4096,
        work=StepWork(max_tokens=max_step_tokens),
        max_running=max_running,
        prefetch_depth=10_000,
        prompts_first=True,
        max_adapters=num_slots,
    )
    times = SlotTimes(
        COSTS,
        num_slots=num_slots,
        max_rank=8 * num_adapters,
        ranks={version: 8 * (number + 1) for number, version in enumerate(adapters)},
        order=adapters[::-1],
    )
    simulator = Simulator(config=config, memory=memory, times=times, adapters=adapters, leaps=leaps)
    for version in adapters:
        simulator.scheduler.adapters.add(version, 1)
    simulator.bring_in_all()
    return simulator


def own_twin(
    *,
    num_adapters: int = 6,
    num_blocks: int = 60,
    max_running: int = 16,
    max_step_tokens: int = 256,
    shared: bool = False,
    leaps: bool = True,
    cold_start: ColdStart = ColdStart.OVERLAP,
    ahead: bool = False,
    position_cost: float = 0.0,
    padded: bool = False,
    batching: Batching = Batching.FCFS,
    num_host_blocks: int | None = None,
) -> Simulator:
    """Our own engine on an imagined machine, with an arena (`shared`) or with a memory for each. Blocks of an
    arena may have a host tier. Policies that merge find that it pays."""
    machine = with_padded_kernels(imagined_machine()) if padded else imagined_machine()
    if batching.merges:
        terms = replace(machine.step.terms, lora_s=4e-3)
        step = replace(machine.step, terms=terms)
        machine = replace(machine, step=step, merge=Line(latency_s=1e-3, unit_s=0.0))
    adapters = [f"adapter-{number}" for number in range(num_adapters)]
    sizes = {version: (number + 1) << 20 for number, version in enumerate(adapters)}
    memory = (
        Arena(
            num_pages=num_blocks,
            page_bytes=1 << 20,
            block_size=16,
            host_bytes=1 << 30,
            pool=CountedPool if num_host_blocks is None else BlockPool,
            host_kv=None if num_host_blocks is None else HostKV(num_host_blocks, 1 << 20),
        )
        if shared
        else SeparateMemory(num_blocks=num_blocks, block_size=16, adapter_bytes=8 << 20, pool=CountedPool)
    )
    config = SchedulerConfig(
        max_model_len=4096,
        work=StepWork(max_tokens=max_step_tokens, position_cost=position_cost),
        max_running=max_running,
        cold_start=cold_start,
        batching=batching,
    )
    merged = dict.fromkeys(sizes, MERGED_BYTES) if batching.merges else {}
    times = CostModelTimes(machine, sizes, merge_bytes=merged)
    simulator = (AheadSimulator if ahead else Simulator)(
        config=config,
        memory=memory,
        times=times,
        adapters=adapters,
        leaps=leaps,
        costs=DriftWatch(machine),
    )
    for version, num_bytes in sizes.items():
        simulator.scheduler.adapters.add(version, num_bytes)
        simulator.scheduler.batcher.merged.know(version, MERGED_BYTES)
    return simulator


def imagined_machine() -> CostModel:
    return CostModel(
        subject=Subject(machine="one", device="cuda", model="some", dtype="bfloat16", num_layers=32),
        measured=True,
        bus=Bus(copy=Line(latency_s=1e-3, unit_s=1e-9), launch_s=3e-6),
        read=Line(latency_s=1e-3, unit_s=4e-9),
        disk=Line(latency_s=1e-3, unit_s=1e-8),
        step=StepCost(
            decodes=RowCurve(rows=(1, 64, 2048), seconds_at=(4e-3, 6e-3, 60e-3)),
            prompts=RowCurve(rows=(1, 64, 2048), seconds_at=(4.1e-3, 6.2e-3, 60e-3)),
            terms=StepTerms(
                prompt_s=20e-6,
                beside_prompts_s=20e-6,
                decode_position_s=1e-7,
                prompt_pair_s=1e-9,
                adapter_s=50e-6,
                adapter_byte_s=1e-12,
                row_adapter_byte_s=1e-13,
            ),
        ),
        assist=AssistCost(round_trip_s=0, token_s=0, call_s=0, weight_s=0, row_s=0),
        memory=EngineMemory(
            max_context=1 << 17,
            token_bytes=512 << 10,
            block_tokens=16,
            arena_bytes=100_000 * (512 << 10),
            kv_tokens=None,
            host_bytes=64 << 30,
            table_bytes=0,
            rank_bytes=dict.fromkeys(MODULES, 512 << 10),
        ),
    )
