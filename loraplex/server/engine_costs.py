"""The costs that an engine process reports when it is ready, so that others can predict its behaviour."""

from __future__ import annotations

from dataclasses import replace

from loraplex.core.engine_policy import EnginePolicy
from loraplex.core.modules import MODULES
from loraplex.engine.core import Engine
from loraplex.engine.interface import EngineCore
from loraplex.engine.options import EngineOptions
from loraplex.perf.cost_model import CostModel
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.profile_json import profile_to_json


def costs_of(config: object, core: EngineCore) -> str | None:
    """Return the profile of this engine with its memory as JSON: measured, or guessed if there is no
    measurement; None if the core is not our engine."""
    if not isinstance(core, Engine) or not isinstance(config, EngineOptions):
        return None
    return profile_to_json(_costs_of(config, core))


def policy_of(options: EngineOptions, core: EngineCore) -> EnginePolicy | None:
    """Return how this engine decides; None if the core is not our engine."""
    if not isinstance(core, Engine):
        return None
    return EnginePolicy(
        cold_start=core.cold_start,
        num_workers=core.num_workers,
        batching=options.batching,
        max_delay=options.max_delay,
        kv_swap_bytes=core.stats().host_kv_budget_bytes,
    )


def _costs_of(options: EngineOptions, core: Engine) -> CostModel:
    # These import torch, so they are imported only where there is such an engine.
    from loraplex.engine.build import choose_device, choose_dtype
    from loraplex.engine.cuda.adapter_block import table_bytes
    from loraplex.engine.cuda.device_arena import page_bytes
    from loraplex.engine.profile_subject import known_costs
    from loraplex.model.config import load_config
    from loraplex.model.sharding import Shard
    from loraplex.model.source import resolve_model

    config = Shard(index=0, count=options.tensor_parallel).config(load_config(resolve_model(options.model)))
    shape, device = config.shape, choose_device(options)
    dtype = choose_dtype(options.dtype, device, config)
    stats, on_gpu = core.stats(), device == "cuda"
    memory = EngineMemory(
        max_context=core.max_model_len,
        token_bytes=page_bytes(shape, 1, dtype),
        block_tokens=options.block_size,
        arena_bytes=stats.device_arena_bytes if on_gpu else None,
        kv_tokens=None if on_gpu else stats.num_kv_blocks * options.block_size,
        host_bytes=stats.host_adapter_budget_bytes,
        table_bytes=table_bytes(shape) if on_gpu else 0,
        step_tokens=core.step_work.max_tokens,
        position_cost=core.step_work.position_cost,
        rank_bytes={
            module: shape.num_layers
            * (shape.in_features(module) + shape.out_features(module))
            * dtype.itemsize
            for module in MODULES
        },
    )
    return replace(known_costs(shape, device, dtype), memory=memory)
