"""Engines with random weights, and adapters that show: each with a scale of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from benchmarks.correctness.check import Setting
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine, random_specs
from loraplex.core.batching import Batching
from loraplex.engine.core import Engine

GPU_MEMORY_BYTES: Final = 32 << 30
"""Memory of adapters and KV cache, unless a check needs less: two sections fit on one device side by side."""


def build(
    shape: str,
    setting: Setting,
    memory_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    distinct: bool = False,
    batching: Batching = Batching.FCFS,
    kv_swap_bytes: int = 0,
) -> Engine:
    """`memory_bytes`: for adapters, and on a GPU for the KV cache too. `kv_swap_bytes`: only on a GPU."""
    if memory_bytes is None and setting.device == "cuda":
        memory_bytes = GPU_MEMORY_BYTES
    return build_random_engine(
        RandomEngineOptions(
            shape=shape,
            device=setting.device,
            dtype=dtype or setting.engine_dtype,
            memory_bytes=memory_bytes,
            distinct=distinct,
            batching=batching,
            kv_swap_bytes=kv_swap_bytes if setting.device == "cuda" else 0,
        )
    )


def distinct_specs(
    name: str, shape: str, *, num_adapters: int, ranks: Sequence[int], modules: str
) -> list[AdapterSpec]:
    """Random adapters of one size share their weights on the host; scales tell them apart.

    With rank r, the weights' spread and these scales, adapters change the outputs of the linears by a good
    part of their size: an adapter that is mistaken for another changes every text.
    """
    specs = random_specs(name, shape, num_adapters=num_adapters, ranks=ranks, modules=modules)
    return [
        replace(
            spec,
            modules=tuple(
                replace(lora, scale=(1 - 2 * (index % 2)) * (1 + index / num_adapters) * 16 / lora.rank**0.5)
                for lora in spec.modules
            ),
        )
        for index, spec in enumerate(specs)
    ]
