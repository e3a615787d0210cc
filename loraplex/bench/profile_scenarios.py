"""`loraplex profile`: measures a machine with one model and fits the cost model to it.

The model has random weights of the right shape: what it costs does not depend on them, and nothing needs to
be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from loraplex.bench.profile_host import Report, measure_assist, measure_bus, measure_disk, measure_reads
from loraplex.bench.profile_steps import StepAdapter, measure_steps, step_cases
from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine, random_spec
from loraplex.core.paths import cache_dir
from loraplex.engine.core import Engine
from loraplex.engine.machine import num_cores
from loraplex.engine.profile_subject import subject_of
from loraplex.model.config import ModelConfig
from loraplex.perf.cost_model import CostModel
from loraplex.perf.step_cost import StepCost

Progress = Callable[[str, float], None]
"""What is being measured, and the share of everything that is done."""

_RANKS: Final = (8, 64)
_MODULES: Final = ("q_proj", "k_proj", "v_proj")
_BLOCK_SIZE: Final = 16
"""Tokens of a KV block of a random engine."""
_SHARES: Final = {"engine": 0.1, "steps": 0.6, "copies": 0.1, "reads": 0.1, "disk": 0.05, "CPU LoRA": 0.05}
"""Of the time, by phase; roughly, for the progress bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """`device`: cpu or cuda. `repeats`: measurements of each kind, after one that does not count."""

    config: ModelConfig
    device: str
    dtype: torch.dtype
    repeats: int = 5


def profile_machine(options: ProfileOptions, progress: Progress) -> CostModel:
    """Takes seconds for a tiny model, minutes for a large one."""
    device, shape = torch.device(options.device), options.config.shape
    on_gpu, cores, repeats = device.type == "cuda", num_cores(), options.repeats
    report = _Phases(progress)
    step = _profile_steps(options, report)
    bus = measure_bus(device, repeats, report.of("copies")) if on_gpu else None
    folder = cache_dir() / "profiles"
    return CostModel(
        subject=subject_of(shape, options.device, options.dtype),
        measured=True,
        bus=bus,
        read=measure_reads(
            folder, num_cores=cores, pinned=on_gpu, repeats=repeats, report=report.of("reads")
        ),
        disk=measure_disk(folder, repeats=repeats, report=report.of("disk")),
        step=step,
        assist=measure_assist(
            shape,
            options.dtype,
            device=device,
            num_cores=cores,
            repeats=repeats,
            report=report.of("CPU LoRA"),
        ),
    )


class _Phases:
    """Turns the shares of phases into the share of everything."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def of(self, phase: str) -> Report:
        names = list(_SHARES)
        before = sum(_SHARES[name] for name in names[: names.index(phase)])
        self._progress(phase, before)
        return lambda done: self._progress(phase, before + done * _SHARES[phase])


def _profile_steps(options: ProfileOptions, report: _Phases) -> StepCost:
    report.of("engine")
    config, on_gpu = options.config, options.device == "cuda"
    engine = build_random_engine(
        RandomEngineOptions(shape="", device=options.device, dtype=options.dtype, compiled=True), config
    )
    try:
        # Half of the memory for each side: whatever were evicted would be loaded again within a step's time.
        stats = engine.stats()
        memory_bytes = max(stats.device_arena_bytes, stats.host_adapter_budget_bytes) // 2
        cases = step_cases(
            _add_adapters(engine, options, memory_bytes, most_each=128 if on_gpu else 16),
            on_gpu=on_gpu,
            max_context=engine.max_model_len,
            max_tokens=stats.num_kv_blocks * _BLOCK_SIZE // 2,
        )
        return measure_steps(
            engine,
            cases,
            vocab_size=config.shape.vocab_size,
            repeats=options.repeats,
            report=report.of("steps"),
        )
    finally:
        engine.close()


def _add_adapters(
    engine: Engine, options: ProfileOptions, memory_bytes: int, most_each: int
) -> list[StepAdapter]:
    """Of each rank as many as fit this memory together, and one at the least."""
    shape, element_bytes = options.config.shape, options.dtype.itemsize
    kinds = {rank: random_spec(f"rank{rank}", shape, rank, _MODULES) for rank in _RANKS}
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
