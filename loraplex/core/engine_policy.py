"""How an engine decides, as far as its digital twin has to know it."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.core.batching import Batching, DelayBound
from loraplex.core.cold_start import ColdStart


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePolicy:
    """`cold_start`: how requests start on absent adapters; None if there is nothing to choose. `num_workers`:
    processes that compute LoRA on CPUs. `batching`, `max_delay`: which requests run together, and by how much
    that may delay one. `kv_swap_bytes`: host memory for keys and values; 0 for none."""

    cold_start: ColdStart | None = None
    num_workers: int = 0
    batching: Batching = Batching.FCFS
    max_delay: DelayBound = field(default_factory=DelayBound)
    kv_swap_bytes: int = 0
