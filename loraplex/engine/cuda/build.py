"""Puts the engine of one CUDA device together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from loraplex.adapters.residency import Residency
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import CapacityError
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.engine.cuda.adapter_store import DeviceReader, HostBlocks
from loraplex.engine.cuda.executor import CudaExecutor
from loraplex.engine.cuda.step_runner import StepRunner
from loraplex.engine.cuda.step_sizes import DECODE_ROWS
from loraplex.kernels.triton.triton_kernels import TritonKernels
from loraplex.model.collective import SOLO, Collective
from loraplex.model.config import ModelConfig
from loraplex.model.decoder import Decoder, KVCache
from loraplex.model.weights import ModelWeights
from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.scheduler import SchedulerConfig
from loraplex.scheduling.work import StepWork

_RESERVE_BYTES: Final = 4 << 30
"""Left for activations, graphs and libraries."""
_ADAPTER_SHARE: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaOptions:
    """What a user may choose. `memory_fraction`: of the device's memory, for all that the engine holds;
    `free_bytes`: instead of it, what KV cache and adapters may take."""

    dtype: torch.dtype = torch.bfloat16
    memory_fraction: float = 0.9
    free_bytes: int | None = None
    max_model_len: int | None = None
    max_step_tokens: int = 2048
    max_running: int = 256
    block_size: int = 16


def build_cuda_core(
    config: ModelConfig,
    weights: ModelWeights,
    options: CudaOptions,
    host_block: Callable[[AdapterSpec], torch.Tensor] | None = None,
    collective: Collective = SOLO,
) -> Engine:
    """An engine over weights that are on the device already.

    `host_block`: where adapters come from, if not from their folders (`adapter_store.HostBlocks`).
    `config` and `weights` may be a shard's, whose `collective` this is; adapters must be cut likewise then.
    """
    device = weights.embedding_VH.device
    shape = config.shape
    kernels = TritonKernels(shape, device)
    max_model_len = options.max_model_len or shape.max_position
    decoder = Decoder(config, weights, kernels, max_model_len, collective)
    free_bytes = options.free_bytes
    if free_bytes is None:
        free_bytes = _free_bytes(device, options.memory_fraction)
    adapter_budget = int(free_bytes * _ADAPTER_SHARE)
    block_bytes = 2 * shape.num_layers * shape.kv_size * options.dtype.itemsize * options.block_size
    num_blocks = (free_bytes - adapter_budget) // block_bytes
    if num_blocks * options.block_size < max_model_len:
        raise CapacityError(
            f"{free_bytes:,} bytes of device memory are free beside the model, too few for a context of "
            f"{max_model_len} tokens; lower --max-model-len or raise the fraction of memory to use"
        )
    # One block more than the scheduler knows of: padding rows of graphs write there.
    size = (num_blocks + 1, shape.num_layers, 2, shape.num_kv_heads, options.block_size, shape.head_dim)
    arena = torch.zeros(size, dtype=options.dtype, device=device)
    caches = [KVCache(k=arena[:, layer, 0], v=arena[:, layer, 1]) for layer in range(shape.num_layers)]
    num_seats = options.max_running + 2
    runner = StepRunner(
        decoder=decoder,
        caches=caches,
        num_seats=num_seats,
        max_blocks=-(-max_model_len // options.block_size),
        scratch_slot=num_blocks * options.block_size,
        device=device,
    )
    executor = CudaExecutor(
        decoder=decoder,
        runner=runner,
        builder=BatchBuilder(kernels, options.block_size),
        reader=DeviceReader(
            shape,
            options.dtype,
            device,
            host_block or HostBlocks(shape, options.dtype, pinned=device.type == "cuda"),
        ),
        dtype=options.dtype,
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
        pool=BlockPool(num_blocks, options.block_size),
        residency=Residency(adapter_budget),
        executor=executor,
    )


def _free_bytes(device: torch.device, fraction: float) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * fraction) - (total - free) - _RESERVE_BYTES)
