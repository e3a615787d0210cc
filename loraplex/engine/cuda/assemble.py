"""Assembles the engine of a CUDA device, or the executor of a shard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_reads import AdapterReads, ReadSlab
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.engine.cuda.adapter_store import AdapterStore, PlanGroups
from loraplex.engine.cuda.compilation import KernelCompilation, keep_compiled_kernels
from loraplex.engine.cuda.costs import CudaCosts, cuda_costs
from loraplex.engine.cuda.cpu_assist import CpuAssist
from loraplex.engine.cuda.device_arena import DeviceArena, page_bytes
from loraplex.engine.cuda.executor import CudaExecutor
from loraplex.engine.cuda.graphs import GraphRecorder
from loraplex.engine.cuda.host_blocks import HostBlocks, HostPool
from loraplex.engine.cuda.host_memory import HostMemory
from loraplex.engine.cuda.kv_swap import KVSwap
from loraplex.engine.cuda.memory_plan import MemoryPlan, plan_memory
from loraplex.engine.cuda.merge_buffer import MergeBuffer
from loraplex.engine.cuda.options import CudaOptions
from loraplex.engine.cuda.padding import PaddedBlocks, Padding
from loraplex.engine.cuda.step_runner import StepRunner
from loraplex.engine.cuda.step_sizes import DECODE_ROWS
from loraplex.engine.cuda.weight_reading import WeightReading
from loraplex.engine.executor import Executor
from loraplex.engine.grammars import Grammars
from loraplex.engine.parallel.messages import Progress
from loraplex.engine.peers import Peers
from loraplex.engine.slab_reader import SlabReaders, read_slab
from loraplex.kernels.triton.triton_kernels import TritonKernels
from loraplex.model.collective import SOLO, Collective
from loraplex.model.config import ModelConfig
from loraplex.model.decoder import Decoder
from loraplex.model.sharding import WHOLE, Shard
from loraplex.model.weights import ModelWeights
from loraplex.perf.cost_model import CostModel
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.cpu_workers import SHORT_PROMPT
from loraplex.scheduling.host_kv import host_kv_of
from loraplex.scheduling.work import StepWork


def build_cuda_core(
    config: ModelConfig,
    weights: ModelWeights,
    options: CudaOptions,
    *,
    read: ReadSlab | None = None,
    host_blocks: HostBlocks | None = None,
    collective: Collective = SOLO,
    peers: Peers | None = None,
    grammars: Grammars | None = None,
) -> Engine:
    """Return an engine over weights that are on the device already.

    `read`: reads an adapter's weights into host memory, instead of from its files; `host_blocks`: replaces
    that memory. `peers`: other replicas that adapters may be copied from.
    `grammars`: as in `assemble_engine`.
    """
    keep_compiled_kernels()
    plan = plan_memory(options, config.shape, weights.embedding_VH.device)
    device, memory = weights.embedding_VH.device, None
    if host_blocks is not None:
        options = replace(options, cpu_workers=0)  # they have no memory to share
    costs = cuda_costs(options, config.shape, device.type)
    if host_blocks is not None:
        reads = AdapterReads(read_slab)
    else:
        reads, close_reads = _adapter_reads(read, peers=peers)
        memory = _host_memory(options, device, costs.num_workers)
        host_blocks = HostPool(config.shape, options.dtype, memory, reads.read, close_reads, keep=reads.keep)
    executor = _build_executor(config, weights, options, costs, plan, host_blocks, memory, reads, collective)
    return assemble_engine(options, costs, plan, config.shape, executor, grammars)


def assemble_engine(
    options: CudaOptions,
    costs: CudaCosts,
    plan: MemoryPlan,
    shape: ModelShape,
    executor: Executor,
    grammars: Grammars | None = None,
) -> Engine:
    """`grammars`: of structured output; None without a tokenizer."""
    return Engine(
        config=SchedulerConfig(
            max_model_len=plan.max_model_len,
            work=StepWork(
                max_tokens=options.max_step_tokens,
                position_cost=shape.attention_flops / shape.linear_flops,
            ),
            max_running=min(options.max_running, DECODE_ROWS[-1]),
            cold_start=options.cold_start,
            num_workers=costs.num_workers,
            loads_popular=options.loads_popular,
            batching=options.batching,
            max_delay=options.max_delay,
            max_borrowing=options.max_borrowing,
        ),
        memory=Arena(
            num_pages=plan.num_pages,
            page_bytes=page_bytes(shape, options.block_size, options.dtype),
            block_size=options.block_size,
            host_bytes=options.host_bytes,
            host_kv=host_kv_of(options.kv_swap_bytes, page_bytes(shape, options.block_size, options.dtype)),
        ),
        costs=DriftWatch(costs.model),
        grammars=grammars,
        executor=executor,
        count_workers=(lambda: executor.num_workers) if isinstance(executor, CudaExecutor) else None,
    )


def assemble_shard(
    shard: Shard,
    local: ModelConfig,
    options: CudaOptions,
    costs: CudaCosts,
    plan: MemoryPlan,
    reading: WeightReading,
    collective: Collective,
    report: Progress,
    peers: Peers | None = None,
) -> CudaExecutor:
    """Return the executor of a shard, given its config and the read of its weights, which has begun."""
    device = torch.device("cuda", shard.index)
    with ExitStack() as undo:
        compilation = KernelCompilation.begin(
            local,
            options.dtype,
            options.block_size,
            device,
            costs.num_workers,
            merges=options.batching.merges,
        )
        if compilation is not None:
            undo.callback(compilation.close)
        weights = reading.finish(report)
        report("allocating memory", 0.0)
        memory = _host_memory(options, device, costs.num_workers)
        reads, close_reads = _adapter_reads(None, shard, peers)
        host_blocks = HostPool(local.shape, options.dtype, memory, reads.read, close_reads, keep=reads.keep)
        executor = _build_executor(
            local, weights, options, costs, plan, host_blocks, memory, reads, collective
        )
        undo.callback(executor.close)
        if compilation is not None:
            compilation.finish(report)
        undo.pop_all()
    return executor


def _host_memory(options: CudaOptions, device: torch.device, num_workers: int) -> HostMemory:
    return HostMemory(options.host_bytes, pinned=device.type == "cuda", shared=num_workers > 0)


def _adapter_reads(
    read: ReadSlab | None, shard: Shard = WHOLE, peers: Peers | None = None
) -> tuple[AdapterReads, Callable[[], None]]:
    """Return what fills slabs, and a function that closes its threads."""
    if read is not None:
        return AdapterReads(read, peers), lambda: None
    readers = SlabReaders(shard)
    return AdapterReads(readers, peers), readers.close


def _build_executor(
    config: ModelConfig,
    weights: ModelWeights,
    options: CudaOptions,
    costs: CudaCosts,
    plan: MemoryPlan,
    host_blocks: HostBlocks,
    memory: HostMemory | None,
    reads: AdapterReads,
    collective: Collective,
) -> CudaExecutor:
    """Return the executor over a shard's `config` and `weights`. `memory`: host memory of adapters, None if
    `host_blocks` has its own; `reads`: fills `host_blocks`, which are closed if this fails."""
    device, shape = weights.embedding_VH.device, config.shape
    with ExitStack() as undo:
        undo.callback(host_blocks.close)
        kernels = TritonKernels(shape, device)
        decoder = Decoder(config, weights, kernels, plan.max_model_len, collective)
        arena = DeviceArena(
            shape, num_pages=plan.num_pages, block_size=options.block_size, dtype=options.dtype, device=device
        )
        # Requests that end in a plan keep their seats until after its launch.
        num_seats = 2 * options.max_running + 2
        store = _build_store(shape, options, costs.model, arena, device, host_blocks)
        assist = _start_workers(options, costs, shape, device, memory)
        if assist is not None:
            undo.callback(assist.close)
        merge_buffer = MergeBuffer(shape, options.dtype, arena)
        kv_swap = _build_kv_swap(shape, options, arena, device)
        if kv_swap is not None:
            undo.callback(kv_swap.close)
        executor = CudaExecutor(
            decoder=decoder,
            runner=StepRunner(
                decoder=decoder,
                caches=arena.caches,
                num_seats=num_seats,
                max_blocks=-(-plan.max_model_len // options.block_size),
                scratch_slot=arena.scratch_slot,
                ticket_1=store.ticket_1,
                device=device,
                recorder=GraphRecorder(device) if device.type == "cuda" else None,
                assist=None if assist is None else assist.memory,
                merged_memory=merge_buffer.weight,
                captures_merged=options.batching.merges,
            ),
            builder=BatchBuilder(kernels, options.block_size),
            arena=arena,
            store=store,
            device=device,
            num_seats=num_seats,
            reads=reads,
            merge_buffer=merge_buffer,
            assist=assist,
            kv_swap=kv_swap,
        )
        undo.pop_all()
    return executor


def _build_kv_swap(
    shape: ModelShape, options: CudaOptions, arena: DeviceArena, device: torch.device
) -> KVSwap | None:
    block_bytes = page_bytes(shape, options.block_size, options.dtype)
    tier = host_kv_of(options.kv_swap_bytes, block_bytes)
    if tier is None:
        return None
    return KVSwap(arena, num_blocks=tier.num_blocks, block_bytes=block_bytes, device=device)


def _build_store(
    shape: ModelShape,
    options: CudaOptions,
    costs: CostModel,
    arena: DeviceArena,
    device: torch.device,
    host_blocks: HostBlocks,
) -> AdapterStore:
    padding = None
    if options.padded_to is not None:
        padding = Padding(shape=shape, dtype=options.dtype, max_rank=options.padded_to)
        host_blocks = PaddedBlocks(padding, host_blocks, pinned=device.type == "cuda")
    plan_groups = _group_planner(costs)
    return AdapterStore(
        shape, options.dtype, device, arena, host_blocks, plan_groups, padding, options.max_copy_bytes_per_s
    )


def _group_planner(costs: CostModel) -> PlanGroups:
    """Return a planner of the copy groups for which a step with a short prompt waits least; single layers if
    there is no bus."""
    if costs.bus is None:
        return lambda layer_bytes: (1,) * len(layer_bytes)
    return partial(costs.plan_groups, step_s=costs.step_s(SHORT_PROMPT))


def _start_workers(
    options: CudaOptions,
    costs: CudaCosts,
    shape: ModelShape,
    device: torch.device,
    memory: HostMemory | None,
) -> CpuAssist | None:
    """Start the CPU workers, if the engine has any. They split tasks as in the profile that their costs are
    from, or as they measure themselves."""
    if costs.num_workers == 0:
        return None
    assert memory is not None
    rows_each = costs.model.assist.rows_each if costs.model.measured else None
    return CpuAssist(
        shape, options.dtype, device, memory, costs.num_workers, options.max_step_tokens, rows_each
    )
