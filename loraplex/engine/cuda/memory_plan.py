"""Plans how the memory of a CUDA device is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from loraplex.core.errors import CapacityError, ModelError
from loraplex.core.shape import ModelShape
from loraplex.engine.cuda.device_arena import page_bytes
from loraplex.engine.cuda.options import CudaOptions
from loraplex.scheduling.host_kv import host_kv_of

_RESERVE_BYTES: Final = 4 << 30
"""Bytes left for activations, graphs and libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The number of pages in the arena, and the longest context that they and the model allow."""

    num_pages: int
    max_model_len: int


def plan_memory(
    options: CudaOptions, shape: ModelShape, device: torch.device, coming_bytes: int = 0
) -> MemoryPlan:
    """Plan the arena. `coming_bytes`: bytes that will be put on the device beside it. Raises CapacityError or
    ModelError."""
    block_bytes = page_bytes(shape, options.block_size, options.dtype)
    host_kv_of(options.kv_swap_bytes, block_bytes)  # refused now, before the weights are read
    arena_bytes = options.arena_bytes
    if arena_bytes is None:
        arena_bytes = max(_free_bytes(device, options.memory_fraction) - coming_bytes, 0)
    # One page is for padding (`device_arena`).
    num_pages = arena_bytes // block_bytes - 1
    if num_pages < 2:
        raise CapacityError(
            f"{arena_bytes:,} bytes of device memory are left beside the model, too few for KV cache and "
            "adapters; raise --memory-fraction, or stop what else runs on the device"
        )
    capacity, wanted = num_pages * options.block_size, options.max_model_len
    if wanted is None:
        return MemoryPlan(num_pages=num_pages, max_model_len=min(shape.max_position, capacity))
    if wanted > shape.max_position:
        raise ModelError(
            f"--max-model-len {wanted} is beyond the model's own context of {shape.max_position}"
        )
    if wanted > capacity:
        raise CapacityError(
            f"device memory holds {capacity} tokens beside the model, fewer than --max-model-len {wanted}; "
            "lower it, or raise --memory-fraction"
        )
    return MemoryPlan(num_pages=num_pages, max_model_len=wanted)


def _free_bytes(device: torch.device, fraction: float) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * fraction) - (total - free) - _RESERVE_BYTES)
