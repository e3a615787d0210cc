"""The options of an engine.

Imports no torch, which takes seconds: a server starts its engine process before it needs torch itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.core.batching import Batching, DelayBound
from loraplex.core.cold_start import ColdStart


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """The options of an engine. None: decided from the model and the machine.

    `kv_memory_bytes` is for a CPU, `memory_fraction` for a GPU, whose memory KV cache and adapters share.
    `tensor_parallel`: number of processes that share the model, each with a part of it, of every adapter and
    of the KV cache. Memory options apply to each process; `memory_share`: the part of the machine's free
    memory that sizes which are not given are taken of, as several engines may share it. `num_threads` is for
    all processes together, on a CPU. If it is None, an engine of one process uses fewer threads while other
    programs take CPU time.
    `cold_start`: what requests do whose adapter is not loaded; on a CPU, which computes from the memory that
    adapters are read into, nothing can be pipelined, and `auto` is `overlap`. `cpu_workers`: processes that
    compute LoRA beside a GPU; `max_cpu_workers`: most of them if their number is decided from the machine,
    which several engines may share. `loads_popular`: load adapters that are requested often into spare memory
    before their next request. `batching`: which requests run together, and `max_delay`, by how much that may
    delay a request. `kv_swap_memory_bytes`: pinned host memory for keys and values of one GPU: of preempted
    requests, and a second level of the prefix cache; None for none.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_memory_bytes: int | None = None
    host_adapter_memory_bytes: int | None = None
    memory_fraction: float | None = None
    memory_share: float = 1.0
    max_model_len: int | None = None
    max_step_tokens: int | None = None
    max_running: int = 256
    block_size: int = 16
    num_threads: int | None = None
    runs_ahead: bool | None = None
    tensor_parallel: int = 1
    cold_start: ColdStart = ColdStart.AUTO
    cpu_workers: int | None = None
    max_cpu_workers: int | None = None
    loads_popular: bool = False
    batching: Batching = Batching.FCFS
    max_delay: DelayBound = field(default_factory=DelayBound)
    max_borrowing: float | None = None
    kv_swap_memory_bytes: int | None = None
