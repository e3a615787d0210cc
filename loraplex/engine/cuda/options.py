"""Options of the engine of a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from loraplex.core.batching import Batching, DelayBound
from loraplex.core.cold_start import ColdStart

DEFAULT_MEMORY_FRACTION: Final = 0.9
MAX_STEP_TOKENS: Final = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaOptions:
    """Options of one device.

    `memory_fraction`: share of the device's memory for everything that the engine holds; `arena_bytes`:
    instead of it, bytes for KV blocks and adapters together. `host_bytes`: the budget for adapters in host
    memory. `kv_swap_bytes`: host memory for keys and values; 0 for none. `cold_start`: the policy for
    requests whose adapter is not on the device. `cpu_workers`: number of processes that compute LoRA for
    adapters being copied; None: by the machine's cores, at most `max_cpu_workers`, where the policy uses
    workers. `batching`, `max_delay`, `max_borrowing`: as in `SchedulerConfig`.

    For comparison: `padded_to`: pad adapters to the largest rank of their batch, at most this one, a power of
    two; `max_copy_bytes_per_s`: slow copies of adapters down to this rate.
    """

    dtype: torch.dtype = torch.bfloat16
    memory_fraction: float = DEFAULT_MEMORY_FRACTION
    arena_bytes: int | None = None
    host_bytes: int = 0
    kv_swap_bytes: int = 0
    max_model_len: int | None = None
    max_step_tokens: int = MAX_STEP_TOKENS
    max_running: int = 256
    block_size: int = 16
    cold_start: ColdStart = ColdStart.AUTO
    cpu_workers: int | None = None
    max_cpu_workers: int | None = None
    loads_popular: bool = False
    batching: Batching = Batching.FCFS
    max_delay: DelayBound = field(default_factory=DelayBound)
    max_borrowing: float | None = None
    padded_to: int | None = None
    max_copy_bytes_per_s: float | None = None
