"""Puts an engine together from options: model, device, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from loraplex.core.errors import CapacityError, ModelError
from loraplex.core.shape import ModelShape
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.engine.machine import available_bytes
from loraplex.engine.torch_executor import TorchExecutor
from loraplex.kernels.interface import Kernels
from loraplex.kernels.reference import TorchKernels
from loraplex.model.config import ModelConfig, load_config
from loraplex.model.decoder import Decoder, KVCache
from loraplex.model.source import resolve_model
from loraplex.model.weights import load_weights
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.scheduler import SchedulerConfig
from loraplex.scheduling.work import StepWork

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_GIB: Final = 1 << 30
_DEFAULT_KV_SHARE: Final = 0.25
_DEFAULT_ADAPTER_SHARE: Final = 0.25
_MAX_DEFAULT_KV_BYTES: Final = 4 * _GIB
_MAX_DEFAULT_ADAPTER_BYTES: Final = 8 * _GIB
_STEP_FLOPS_PER_THREAD: Final = 2e10
"""A quarter of a second for a core with AVX-512: how long a prompt may hold up everybody's next token."""
_ATTENTION_FACTOR: Final = 2.5
"""How much longer than its operations say attention over a long context takes on a CPU, beside the linears:
with the demo's model, chunks sized without it took 0.27 s at the start of a prompt and 0.7 s at 7,400."""
_MIN_STEP_TOKENS: Final = 32
_MAX_STEP_TOKENS: Final = 2048

Progress = Callable[[str, float], None]
"""Called with (what is going on, fraction done)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What a user may choose of an engine. None: decided from the model and the machine."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_memory_bytes: int | None = None
    host_adapter_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_step_tokens: int | None = None
    max_running: int = 256
    block_size: int = 16
    num_threads: int | None = None
    runs_ahead: bool | None = None


def build_core(options: EngineOptions, progress: Progress | None = None) -> Engine:
    """Load the model and allocate its memory. Raises ModelError or CapacityError with the fix."""
    report = progress or (lambda phase, fraction: None)
    _check_device(options.device)
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    folder = resolve_model(options.model)
    config = load_config(folder)
    dtype = _choose_dtype(options.dtype)
    num_blocks, max_model_len = _plan_memory(options, config, dtype)
    kernels = _choose_kernels(config, dtype)
    decoder = _load_decoder(folder, config, dtype, kernels, max_model_len, report)
    executor = TorchExecutor(
        decoder=decoder,
        caches=[
            KVCache.zeros(config.shape, num_blocks, options.block_size, dtype)
            for _ in range(config.shape.num_layers)
        ],
        builder=BatchBuilder(kernels, options.block_size),
        dtype=dtype,
        runs_ahead=bool(options.runs_ahead),
    )
    budget = options.host_adapter_memory_bytes
    if budget is None:
        budget = min(int(available_bytes() * _DEFAULT_ADAPTER_SHARE), _MAX_DEFAULT_ADAPTER_BYTES)
    report("ready", 1.0)
    return Engine(
        config=SchedulerConfig(
            max_model_len=max_model_len,
            work=_plan_work(options, config.shape),
            max_running=options.max_running,
        ),
        memory=SeparateMemory(num_blocks=num_blocks, block_size=options.block_size, adapter_bytes=budget),
        executor=executor,
    )


def _check_device(device: str) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise ModelError(f"unknown device {device!r}; choose auto, cpu or cuda")
    if device == "cuda":
        raise ModelError("this release computes on the CPU only; start it with --device cpu")


def _choose_dtype(name: str) -> torch.dtype:
    """float32 unless asked otherwise: on a CPU it is the type with compiled kernels, and the exact one."""
    if name == "auto":
        return torch.float32
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _choose_kernels(config: ModelConfig, dtype: torch.dtype) -> Kernels:
    if dtype is torch.float32:
        from loraplex.kernels.cpu.numba_kernels import NumbaKernels

        return NumbaKernels(config.shape.head_dim)
    return TorchKernels()


def _load_decoder(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    kernels: Kernels,
    max_model_len: int,
    report: Progress,
) -> Decoder:
    def on_bytes(done: int, total: int) -> None:
        report("reading weights", 0.9 * done / max(total, 1))

    weights = load_weights(folder, config, dtype, on_bytes)
    report("preparing weights", 0.9)
    return Decoder(config, weights, kernels, max_model_len)


def _plan_work(options: EngineOptions, shape: ModelShape) -> StepWork:
    """Steps that take roughly as long whatever the model and the context are."""
    max_tokens = options.max_step_tokens
    if max_tokens is None:
        affordable = int(torch.get_num_threads() * _STEP_FLOPS_PER_THREAD / shape.linear_flops)
        max_tokens = max(_MIN_STEP_TOKENS, min(affordable, _MAX_STEP_TOKENS))
    position_cost = _ATTENTION_FACTOR * shape.attention_flops / shape.linear_flops
    return StepWork(max_tokens=max_tokens, position_cost=position_cost)


def _plan_memory(options: EngineOptions, config: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """KV blocks for the budget, and the longest context they and the model allow."""
    shape = config.shape
    token_bytes = 2 * shape.num_layers * shape.kv_size * dtype.itemsize
    budget = options.kv_memory_bytes
    if budget is None:
        budget = min(int(available_bytes() * _DEFAULT_KV_SHARE), _MAX_DEFAULT_KV_BYTES)
        # No more than every request the engine runs at once could ever fill.
        budget = min(budget, options.max_running * shape.max_position * token_bytes)
    num_blocks = budget // (token_bytes * options.block_size)
    if budget > available_bytes():
        raise CapacityError(
            f"--kv-memory asks for {budget:,} bytes, this machine has {available_bytes():,} to give"
        )
    if num_blocks < 2:
        raise CapacityError(
            f"{budget:,} bytes of KV memory hold no {2 * options.block_size} tokens of this model "
            f"({token_bytes:,} bytes each); raise --kv-memory"
        )
    capacity = num_blocks * options.block_size
    wanted = options.max_model_len
    if wanted is None:
        return num_blocks, min(shape.max_position, capacity)
    if wanted > shape.max_position:
        raise ModelError(
            f"--max-model-len {wanted} is beyond the model's own context of {shape.max_position}"
        )
    if wanted > capacity:
        raise CapacityError(
            f"KV memory holds {capacity} tokens, fewer than --max-model-len {wanted}; raise --kv-memory "
            f"to at least {wanted * token_bytes:,} bytes or lower --max-model-len"
        )
    return num_blocks, wanted
