"""`loraplex profile`: measures a machine with one model and fits the cost model to it.

The model has random weights of the right shape: costs do not depend on them, and nothing needs to be read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from loraplex.bench.profile_host import Predicted, measure_bus, measure_disk
from loraplex.bench.profile_merges import measure_merges
from loraplex.bench.profile_progress import PhaseProgress, Progress
from loraplex.bench.profile_reads import measure_reads
from loraplex.bench.profile_serving import measure_serving
from loraplex.bench.profile_steps import MeasuredSteps, StepCases, fit_steps, measure_steps
from loraplex.bench.random_engine import BLOCK_SIZE, RandomEngineOptions, build_random_engine, random_spec
from loraplex.bench.step_cases import (
    CaseLimits,
    StepAdapter,
    StepCase,
    held_out_decodes,
    held_out_prompts,
    step_cases,
)
from loraplex.core.modules import MODULES
from loraplex.core.paths import cache_dir
from loraplex.engine.core import Engine
from loraplex.engine.cpu_build import plan_adapter_bytes, plan_cpu
from loraplex.engine.cuda.adapter_block import table_bytes
from loraplex.engine.cuda.device_arena import page_bytes
from loraplex.engine.cuda.host_memory import default_host_bytes
from loraplex.engine.machine import max_threads, num_cores
from loraplex.engine.options import EngineOptions
from loraplex.engine.profile_subject import subject_of
from loraplex.model.config import ModelConfig
from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.assist_split import default_num_workers
from loraplex.perf.cost_model import CostModel
from loraplex.perf.default_model import default_cost_model, default_merge
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.held_out import HeldOut
from loraplex.perf.least_squares import quality_of
from loraplex.perf.line import Line
from loraplex.perf.step_cost import StepSample

_RANKS: Final = (8, 64)
_HELD_OUT_RANKS: Final = (16, 32)
_NUM_HELD_OUT: Final = 24
"""Number of held-out steps of either kind: decodes and prompts."""
_MODULES: Final = ("q_proj", "k_proj", "v_proj")
_GPU_REPEATS: Final = 3
CPU_REPEATS: Final = 25
_READ_REPEATS: Final = 12
"""Least repeats for reads of files: the host is less steady than a GPU."""
_MERGE_REPEATS: Final = 5
_QUICK_STEPS: Final = 0.8
"""Share of the time of a quick profile after which the engine's steps have been measured."""
_LEAST_STEPS_S: Final = 1.0
_SMALLER_BY: Final = 8
_MAX_SERVED_EACH: Final = 40
"""Most steps of serving with each number of requests."""
_GPU_WEIGHTS: Final = {
    "engine": 0.0,
    "steps": 1.0,
    "serving": 0.3,
    "merges": 0.02,
    "copies": 0.1,
    "reads": 0.2,
    "disk": 0.1,
    "CPU LoRA": 0.1,
}
_CPU_WEIGHTS: Final = {"engine": 0.0, "steps": 1.0, "merges": 0.002, "reads": 0.006, "disk": 0.002}
"""Rough duration of each phase, relative to that of the engine's steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """Options of a profile. `device`: cpu or cuda. `repeats`: measurements of each kind, after one that does
    not count; None: a few on a GPU, which is steady, and more on a CPU, which other programs use as well.
    `quick_s`: seconds that it may take, about: fewer kinds of steps are measured, and fewer times."""

    config: ModelConfig
    device: str
    dtype: torch.dtype
    repeats: int | None = None
    quick_s: float | None = None


def profile_machine(options: ProfileOptions, progress: Progress) -> CostModel:
    """Measure this machine and fit the cost model. Takes minutes, on a CPU up to hours: most of it for steps
    of the engine, each kind many times."""
    started_s = time.monotonic()
    device, shape, dtype = torch.device(options.device), options.config.shape, options.dtype
    on_gpu = device.type == "cuda"
    is_quick = options.quick_s is not None
    repeats = options.repeats or (_GPU_REPEATS if on_gpu or is_quick else CPU_REPEATS)
    report = PhaseProgress(progress, _GPU_WEIGHTS if on_gpu else _CPU_WEIGHTS)
    until_s = None if options.quick_s is None else started_s + options.quick_s * _QUICK_STEPS
    steps, merge, memory = _profile_engine(options, repeats, report, until_s)
    bus, copies = measure_bus(device, repeats, report.of("copies")) if on_gpu else (None, [])
    folder = cache_dir() / "profiles"
    read, reads = measure_reads(
        folder,
        shape,
        dtype,
        on_gpu=on_gpu,
        repeats=options.repeats or (repeats if is_quick else max(repeats, _READ_REPEATS)),
        report=report.of("reads"),
    )
    loads: list[Predicted] = [*copies, *reads]
    load = quality_of([each.predicted_s for each in loads], [each.measured_s for each in loads])
    return CostModel(
        subject=subject_of(shape, options.device, dtype),
        measured=True,
        bus=bus,
        read=read,
        disk=measure_disk(folder, repeats=repeats, report=report.of("disk")),
        step=steps.cost,
        assist=_measure_assist(options, repeats, report),
        held_out=HeldOut(decode=steps.decodes, prefill=steps.prompts, serving=steps.serving, load=load),
        memory=memory,
        merge=merge or default_merge(options.device, steps.cost),
    )


def _measure_assist(options: ProfileOptions, repeats: int, report: PhaseProgress) -> AssistCost:
    """Measure CPU workers where there are any: beside a GPU, on a machine with enough cores."""
    device, shape = torch.device(options.device), options.config.shape
    num_workers = default_num_workers(max_threads()) if device.type == "cuda" else 0
    if num_workers == 0:
        subject = subject_of(shape, options.device, options.dtype)
        return default_cost_model(subject, shape, num_cores=num_cores()).assist
    from loraplex.bench.profile_assist import measure_assist  # needs Triton, which a CPU does not

    return measure_assist(
        shape,
        options.dtype,
        device=device,
        num_workers=num_workers,
        repeats=repeats,
        report=report.of("CPU LoRA"),
    )


def _profile_engine(
    options: ProfileOptions, repeats: int, report: PhaseProgress, until_s: float | None = None
) -> tuple[MeasuredSteps, Line | None, EngineMemory]:
    report.of("engine")
    config, on_gpu = options.config, options.device == "cuda"
    engine = build_random_engine(
        RandomEngineOptions(shape="", device=options.device, dtype=options.dtype, compiled=True), config
    )
    try:
        # Adapters get half of the memory, so that none is evicted: a timed step would have to load it again.
        stats = engine.stats()
        memory_bytes = (stats.device_arena_bytes or stats.host_adapter_budget_bytes) // 2
        fitted = _add_adapters(engine, options, _RANKS, memory_bytes // 2, most_each=128 if on_gpu else 16)
        others = _add_adapters(engine, options, _HELD_OUT_RANKS, memory_bytes // 2, most_each=16)
        # On a GPU, adapters and KV blocks share the memory. A little of it is left free.
        shared = sum(adapter.num_bytes for adapter in (*fitted, *others)) if on_gpu else 0
        num_blocks = stats.num_kv_blocks - shared // page_bytes(config.shape, BLOCK_SIZE, options.dtype)
        limits = CaseLimits(
            on_gpu=on_gpu,
            max_context=engine.max_model_len,
            max_tokens=num_blocks * BLOCK_SIZE * 15 // 16,
            work=engine.step_work,
        )
        limits.check()
        engine.warm_up()  # now that adapters are known: no graph is captured while serving
        vocab_size, held_out = config.shape.vocab_size, [*fitted[::4], *others]
        cases = step_cases(fitted, limits)
        num_held_out = _NUM_HELD_OUT if until_s is None else _NUM_HELD_OUT // 3
        has_few_steps = until_s is not None and not on_gpu
        most = max(case.num_tokens for case in cases) // (_SMALLER_BY if has_few_steps else 1)
        samples = measure_steps(
            engine,
            StepCases(
                fitted=_up_to(most, cases),
                decodes=_up_to(most, held_out_decodes(held_out, limits, num_held_out)),
                prompts=_up_to(most, held_out_prompts(held_out, limits, num_held_out)),
            ),
            vocab_size=vocab_size,
            repeats=repeats,
            has_few_steps=has_few_steps,
            report=report.of("steps"),
            budget_s=None if until_s is None else max(until_s - time.monotonic(), _LEAST_STEPS_S),
        )
        served, unseen = list[StepSample](), list[StepSample]()
        if on_gpu:  # on a CPU, which other programs use, single steps are the better samples
            served, unseen = measure_serving(
                engine,
                fitted[::4],
                held_out,
                limits,
                vocab_size=vocab_size,
                steps_each=min(repeats * 10, _MAX_SERVED_EACH),
                report=report.of("serving"),
            )
        steps = fit_steps(samples, served, unseen, stepped=on_gpu)
        merge = measure_merges(
            engine,
            fitted[0].version,
            vocab_size=vocab_size,
            repeats=min(repeats, _MERGE_REPEATS),
            report=report.of("merges"),
        )
        return steps, merge, _memory_of(engine, options)
    finally:
        engine.close()


def _up_to(most: int, cases: Sequence[StepCase]) -> list[StepCase]:
    """Return the cases of at most so many tokens. The largest take most of the time on a CPU; their costs
    follow from those of the others, as steps of many rows cost in proportion to them."""
    return [case for case in cases if case.num_tokens <= most]


def _memory_of(engine: Engine, options: ProfileOptions) -> EngineMemory:
    """Return the memory of an engine that serves: on a CPU as it would be planned now, because the measured
    engine is small."""
    shape, element_bytes, on_gpu = options.config.shape, options.dtype.itemsize, options.device == "cuda"
    serving = EngineOptions(model="")
    plan = None if on_gpu else plan_cpu(serving, options.config, options.dtype)
    work = engine.step_work if plan is None else plan.work
    return EngineMemory(
        max_context=engine.max_model_len if plan is None else plan.max_model_len,
        token_bytes=page_bytes(shape, 1, options.dtype),
        block_tokens=BLOCK_SIZE,
        arena_bytes=engine.stats().device_arena_bytes if plan is None else None,
        kv_tokens=None if plan is None else plan.num_blocks * BLOCK_SIZE,
        # Random adapters share their weights on the host of a GPU, so this engine's own budget says nothing.
        host_bytes=default_host_bytes() if plan is None else plan_adapter_bytes(serving),
        table_bytes=table_bytes(shape) if on_gpu else 0,
        step_tokens=work.max_tokens,
        position_cost=work.position_cost,
        rank_bytes={
            module: shape.num_layers
            * (shape.in_features(module) + shape.out_features(module))
            * element_bytes
            for module in MODULES
        },
    )


def _add_adapters(
    engine: Engine, options: ProfileOptions, ranks: Sequence[int], memory_bytes: int, most_each: int
) -> list[StepAdapter]:
    """Add equally many adapters of each rank, as many as fit this memory together, and at least one."""
    shape, element_bytes = options.config.shape, options.dtype.itemsize
    kinds = {rank: random_spec(f"rank{rank}", shape, rank, _MODULES) for rank in ranks}
    bytes_of_one_each = sum(spec.num_params for spec in kinds.values()) * element_bytes
    num_each = max(min(most_each, memory_bytes // bytes_of_one_each), 1)
    found = []
    for rank, kind in kinds.items():
        for index in range(num_each):
            version = f"{kind.version}-{index:03d}"
            engine.add_adapter(replace(kind, version=version, path=Path(version)))
            num_bytes = kind.num_params * element_bytes
            found.append(StepAdapter(version=version, rank=rank, num_bytes=num_bytes))
    return found
