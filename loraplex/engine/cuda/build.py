"""Puts the engine of one CUDA device together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from loraplex.core.errors import CapacityError, ModelError
from loraplex.core.shape import ModelShape
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.engine.cuda.adapter_store import AdapterStore, HostBlocks
from loraplex.engine.cuda.device_arena import DeviceArena, page_bytes
from loraplex.engine.cuda.executor import CudaExecutor
from loraplex.engine.cuda.host_pool import HostPool
from loraplex.engine.cuda.padding import PaddedBlocks, Padding
from loraplex.engine.cuda.step_runner import StepRunner
from loraplex.engine.cuda.step_sizes import DECODE_ROWS
from loraplex.kernels.triton.triton_kernels import TritonKernels
from loraplex.model.config import ModelConfig
from loraplex.model.decoder import Decoder
from loraplex.model.weights import ModelWeights
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.scheduler import SchedulerConfig
from loraplex.scheduling.work import StepWork

DEFAULT_MEMORY_FRACTION: Final = 0.9
_RESERVE_BYTES: Final = 4 << 30
"""Left for activations, graphs and libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaOptions:
    """What a user may choose. `memory_fraction`: of the device's memory, for all that the engine holds;
    `arena_bytes`: instead of it, what KV blocks and adapters have together. `host_bytes`: the budget for
    adapters in host memory. `padded_to`: for comparison, pad adapters to the largest rank of their batch,
    which may be this one at the most, a power of two."""

    dtype: torch.dtype = torch.bfloat16
    memory_fraction: float = DEFAULT_MEMORY_FRACTION
    arena_bytes: int | None = None
    host_bytes: int = 0
    max_model_len: int | None = None
    max_step_tokens: int = 2048
    max_running: int = 256
    block_size: int = 16
    padded_to: int | None = None


def build_cuda_core(
    config: ModelConfig, weights: ModelWeights, options: CudaOptions, host_blocks: HostBlocks | None = None
) -> Engine:
    """An engine over weights that are on the device already.

    `host_blocks`: where adapters come from, if not from their folders by way of a `HostPool`.
    """
    device, shape = weights.embedding_VH.device, config.shape
    kernels = TritonKernels(shape, device)
    num_pages, max_model_len = _plan_memory(options, shape, device)
    decoder = Decoder(config, weights, kernels, max_model_len)
    arena = DeviceArena(
        shape, num_pages=num_pages, block_size=options.block_size, dtype=options.dtype, device=device
    )
    num_seats = options.max_running + 2
    if host_blocks is None:
        host_blocks = HostPool(
            shape, options.dtype, budget_bytes=options.host_bytes, pinned=device.type == "cuda"
        )
    padding = None
    if options.padded_to is not None:
        padding = Padding(shape=shape, dtype=options.dtype, max_rank=options.padded_to)
        host_blocks = PaddedBlocks(padding, host_blocks, pinned=device.type == "cuda")
    executor = CudaExecutor(
        decoder=decoder,
        runner=StepRunner(
            decoder=decoder,
            caches=arena.caches,
            num_seats=num_seats,
            max_blocks=-(-max_model_len // options.block_size),
            scratch_slot=arena.scratch_slot,
            device=device,
        ),
        builder=BatchBuilder(kernels, options.block_size),
        arena=arena,
        store=AdapterStore(shape, options.dtype, device, arena, host_blocks, padding),
        device=device,
        num_seats=num_seats,
    )
    return Engine(
        config=SchedulerConfig(
            max_model_len=max_model_len,
            work=StepWork(
                max_tokens=options.max_step_tokens,
                position_cost=shape.attention_flops / shape.linear_flops,
            ),
            max_running=min(options.max_running, DECODE_ROWS[-1]),
        ),
        memory=Arena(
            num_pages=num_pages,
            page_bytes=page_bytes(shape, options.block_size, options.dtype),
            block_size=options.block_size,
        ),
        executor=executor,
    )


def _plan_memory(options: CudaOptions, shape: ModelShape, device: torch.device) -> tuple[int, int]:
    """Pages of the arena, and the longest context they and the model allow."""
    arena_bytes = options.arena_bytes
    if arena_bytes is None:
        arena_bytes = _free_bytes(device, options.memory_fraction)
    # One page is the device's own, for padding.
    num_pages = arena_bytes // page_bytes(shape, options.block_size, options.dtype) - 1
    if num_pages < 2:
        raise CapacityError(
            f"{arena_bytes:,} bytes of device memory are left beside the model, too few for KV cache and "
            "adapters; raise --memory-fraction, or stop what else runs on the device"
        )
    capacity, wanted = num_pages * options.block_size, options.max_model_len
    if wanted is None:
        return num_pages, min(shape.max_position, capacity)
    if wanted > shape.max_position:
        raise ModelError(
            f"--max-model-len {wanted} is beyond the model's own context of {shape.max_position}"
        )
    if wanted > capacity:
        raise CapacityError(
            f"device memory holds {capacity} tokens beside the model, fewer than --max-model-len {wanted}; "
            "lower it, or raise --memory-fraction"
        )
    return num_pages, wanted


def _free_bytes(device: torch.device, fraction: float) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * fraction) - (total - free) - _RESERVE_BYTES)
