"""Builds an engine for CPUs: separate budgets for KV cache and adapters, steps limited by time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError, ModelError
from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_reads import AdapterReads
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.engine.cpu_threads import StepThreads, default_threads
from loraplex.engine.executor import Executor
from loraplex.engine.grammars import Grammars
from loraplex.engine.machine import available_bytes
from loraplex.engine.parallel.messages import Progress
from loraplex.engine.parallel.start import start_parallel
from loraplex.engine.peers import Peers
from loraplex.engine.profile_subject import known_costs
from loraplex.engine.slab_reader import read_slab
from loraplex.engine.torch_executor import TorchExecutor
from loraplex.kernels.cpu.file_matrices import compile_reader
from loraplex.kernels.interface import Kernels
from loraplex.kernels.reference import TorchKernels
from loraplex.model.collective import SOLO, Collective
from loraplex.model.config import ModelConfig, load_config
from loraplex.model.decoder import Decoder, KVCache
from loraplex.model.sharding import WHOLE, Shard
from loraplex.model.weights import load_weights
from loraplex.perf.drift import DriftWatch
from loraplex.perf.thread_governor import ThreadGovernor
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.work import StepWork

if TYPE_CHECKING:
    from loraplex.engine.options import EngineOptions

_GIB: Final = 1 << 30
_DEFAULT_KV_SHARE: Final = 0.25
_DEFAULT_ADAPTER_SHARE: Final = 0.25
_MAX_DEFAULT_KV_BYTES: Final = 4 * _GIB
_MAX_DEFAULT_ADAPTER_BYTES: Final = 8 * _GIB
_STEP_FLOPS_PER_THREAD: Final = 2e10
"""A quarter of a second on a core with AVX-512: the longest that a prompt may delay other requests' next
token."""
_ATTENTION_FACTOR: Final = 2.5
"""Factor by which attention over a long context takes longer on a CPU than its operations say, relative to
the linears: with the demo's model, chunks sized without it took 0.27 s at the start of a prompt and 0.7 s at
7,400."""
_MIN_STEP_TOKENS: Final = 32
_MAX_STEP_TOKENS: Final = 2048


class CpuPlan(NamedTuple):
    """The resources of each process of an engine: KV blocks, the longest context, and the work of a step."""

    num_blocks: int
    max_model_len: int
    work: StepWork


def plan_cpu(options: EngineOptions, config: ModelConfig, dtype: torch.dtype) -> CpuPlan:
    """`config`: configuration of one process's part of the model."""
    num_blocks, max_model_len = _plan_memory(options, config, dtype)
    return CpuPlan(num_blocks, max_model_len, _plan_work(options, config.shape, _threads_of_each(options)))


def plan_adapter_bytes(options: EngineOptions) -> int:
    """Return the bytes for adapters of each process: a share of the memory left by weights and KV cache."""
    if options.host_adapter_memory_bytes is not None:
        return options.host_adapter_memory_bytes
    share = _DEFAULT_ADAPTER_SHARE * options.memory_share / options.tensor_parallel
    return min(int(available_bytes() * share), _MAX_DEFAULT_ADAPTER_BYTES)


def build_cpu_engine(
    options: EngineOptions,
    config: ModelConfig,
    dtype: torch.dtype,
    report: Progress,
    peers: Peers | None = None,
) -> Engine:
    """`options.model` is a folder, and `config` the whole model's. `peers`: other replicas that adapters may
    be copied from; engines of several processes read adapters from files."""
    num_shards, num_threads = options.tensor_parallel, _threads_of_each(options)
    plan = plan_cpu(options, Shard(index=0, count=num_shards).config(config), dtype)
    build = partial(
        _build_shard, options, dtype, num_blocks=plan.num_blocks, max_model_len=plan.max_model_len
    )
    executor: Executor
    if num_shards == 1:
        torch.set_num_threads(num_threads)
        # A number that the user chose is never changed.
        if options.num_threads is None and num_threads > 1:
            build = partial(build, threads=StepThreads(ThreadGovernor(num_threads), plan.work))
        executor = build(WHOLE, SOLO, report, peers=peers)
    else:
        executor = start_parallel(
            build, count=num_shards, device="cpu", num_threads=num_threads, report=report
        )
    costs = DriftWatch(known_costs(config.shape, "cpu", dtype))
    return Engine(
        config=SchedulerConfig(
            max_model_len=plan.max_model_len,
            work=plan.work,
            max_running=options.max_running,
            cold_start=ColdStart.OVERLAP if options.cold_start is ColdStart.AUTO else options.cold_start,
            loads_popular=options.loads_popular,
            batching=options.batching,
            max_delay=options.max_delay,
            max_borrowing=options.max_borrowing,
        ),
        memory=SeparateMemory(
            num_blocks=plan.num_blocks,
            block_size=options.block_size,
            adapter_bytes=plan_adapter_bytes(options),
        ),
        executor=executor,
        grammars=Grammars.of_model(Path(options.model), config),
        costs=costs if options.batching.needs_costs else None,
        request_costs=costs,
    )


def _build_shard(
    options: EngineOptions,
    dtype: torch.dtype,
    shard: Shard,
    collective: Collective,
    report: Progress,
    *,
    num_blocks: int,
    max_model_len: int,
    threads: StepThreads | None = None,
    peers: Peers | None = None,
) -> TorchExecutor:
    """Load a shard and allocate its memory; every process of an engine does so with the same numbers."""
    folder = Path(options.model)
    config = load_config(folder)
    local = shard.config(config)
    tokenizer = Grammars.of_model(folder, config).prepare()
    report("compiling kernels", 0.0)
    kernels = choose_kernels(local, dtype)
    compile_reader()  # otherwise the first adapter would wait for it

    def on_bytes(done: int, total: int) -> None:
        report("reading weights", done / max(total, 1))

    weights = load_weights(folder, config, dtype, on_bytes, shard)
    report("preparing weights", 0.0)
    tokenizer.result()
    return TorchExecutor(
        decoder=Decoder(local, weights, kernels, max_model_len, collective),
        caches=[
            KVCache.zeros(local.shape, num_blocks, options.block_size, dtype)
            for _ in range(local.shape.num_layers)
        ],
        builder=BatchBuilder(kernels, options.block_size),
        dtype=dtype,
        runs_ahead=bool(options.runs_ahead),
        reads=AdapterReads(partial(read_slab, shard=shard), peers),
        threads=threads,
    )


def _threads_of_each(options: EngineOptions) -> int:
    """Return the threads of each process: an equal share of the machine's, or of those the user gives."""
    num_threads = default_threads() if options.num_threads is None else options.num_threads
    return max(num_threads // options.tensor_parallel, 1)


def choose_kernels(config: ModelConfig, dtype: torch.dtype) -> Kernels:
    """Return compiled kernels for float32, otherwise torch's."""
    if dtype is torch.float32:
        from loraplex.kernels.cpu.numba_kernels import NumbaKernels

        return NumbaKernels(config.shape.head_dim)
    return TorchKernels()


def _plan_work(options: EngineOptions, shape: ModelShape, num_threads: int) -> StepWork:
    """Limit steps so that they take about as long whatever the model and the context."""
    max_tokens = options.max_step_tokens
    if max_tokens is None:
        affordable = int(num_threads * _STEP_FLOPS_PER_THREAD / shape.linear_flops)
        max_tokens = max(_MIN_STEP_TOKENS, min(affordable, _MAX_STEP_TOKENS))
    position_cost = _ATTENTION_FACTOR * shape.attention_flops / shape.linear_flops
    return StepWork(max_tokens=max_tokens, position_cost=position_cost)


def _plan_memory(options: EngineOptions, config: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Return the KV blocks of each process for its budget, and the longest context they and the model
    allow."""
    shape = config.shape
    available = available_bytes() // options.tensor_parallel
    token_bytes = 2 * shape.num_layers * shape.kv_size * dtype.itemsize
    budget = options.kv_memory_bytes
    if budget is None:
        budget = min(int(available * _DEFAULT_KV_SHARE * options.memory_share), _MAX_DEFAULT_KV_BYTES)
        # No more than all concurrently running requests could ever fill.
        budget = min(budget, options.max_running * shape.max_position * token_bytes)
    num_blocks = budget // (token_bytes * options.block_size)
    if budget > available:
        each = "" if options.tensor_parallel == 1 else f" to each of {options.tensor_parallel} processes"
        raise CapacityError(
            f"--kv-memory asks for {budget:,} bytes, this machine has {available:,} to give{each}"
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
