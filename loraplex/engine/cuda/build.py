"""Puts the engine of a CUDA device together, or that of several which share a model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError, ModelError
from loraplex.core.shape import ModelShape
from loraplex.engine.assist.split import default_num_workers
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.engine.cuda.adapter_block import ReadSlab
from loraplex.engine.cuda.adapter_store import AdapterStore, PlanGroups
from loraplex.engine.cuda.compilation import KernelCompilation, keep_compiled_kernels
from loraplex.engine.cuda.cpu_assist import start_assist
from loraplex.engine.cuda.device_arena import DeviceArena, page_bytes
from loraplex.engine.cuda.executor import CudaExecutor
from loraplex.engine.cuda.graphs import GraphRecorder
from loraplex.engine.cuda.host_blocks import HostBlocks, HostPool
from loraplex.engine.cuda.host_memory import HostMemory, default_host_bytes
from loraplex.engine.cuda.padding import PaddedBlocks, Padding
from loraplex.engine.cuda.step_runner import StepRunner
from loraplex.engine.cuda.step_sizes import DECODE_ROWS
from loraplex.engine.cuda.streams import use_device
from loraplex.engine.cuda.weight_copies import MAX_THREADS, WeightCopies
from loraplex.engine.executor import Executor
from loraplex.engine.machine import num_cores
from loraplex.engine.parallel.messages import Progress
from loraplex.engine.parallel.start import start_parallel
from loraplex.engine.profile_subject import known_costs
from loraplex.engine.slab_reader import SlabReaders
from loraplex.kernels.triton.triton_kernels import TritonKernels
from loraplex.model.collective import SOLO, Collective
from loraplex.model.config import ModelConfig, load_config
from loraplex.model.decoder import Decoder
from loraplex.model.sharding import WHOLE, Shard
from loraplex.model.weights import ModelWeights, load_weights, weight_bytes
from loraplex.perf.cost_model import CostModel
from loraplex.perf.drift import DriftWatch
from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.staging import Staging
from loraplex.scheduling.work import StepWork

if TYPE_CHECKING:
    from loraplex.engine.build import EngineOptions

DEFAULT_MEMORY_FRACTION: Final = 0.9
_RESERVE_BYTES: Final = 4 << 30
"""Left for activations, graphs and libraries."""
_MAX_STEP_TOKENS: Final = 2048
_SHORT_PROMPT: Final = StepFeatures(num_prompts=1, num_prompt_tokens=128)


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaOptions:
    """What a user may choose. `memory_fraction`: of the device's memory, for all that the engine holds;
    `arena_bytes`: instead of it, what KV blocks and adapters have together. `host_bytes`: the budget for
    adapters in host memory. `cold_start`: what requests do whose adapter is not on the device. `cpu_workers`:
    processes that compute LoRA for `ColdStart.CPU_ASSIST`; None: as the machine has cores, if that is chosen.
    `padded_to`: for comparison, pad adapters to the largest rank of their batch, which may be this one at the
    most, a power of two."""

    dtype: torch.dtype = torch.bfloat16
    memory_fraction: float = DEFAULT_MEMORY_FRACTION
    arena_bytes: int | None = None
    host_bytes: int = 0
    max_model_len: int | None = None
    max_step_tokens: int = _MAX_STEP_TOKENS
    max_running: int = 256
    block_size: int = 16
    cold_start: ColdStart = ColdStart.AUTO
    cpu_workers: int | None = None
    loads_popular: bool = False
    padded_to: int | None = None


def build_cuda_engine(
    options: EngineOptions, config: ModelConfig, dtype: torch.dtype, report: Progress
) -> Engine:
    """An engine over a checkpoint: `options.model` is a folder, and `config` the whole model's."""
    num_shards = options.tensor_parallel
    local = Shard(index=0, count=num_shards).config(config)
    host_bytes = options.host_adapter_memory_bytes
    if host_bytes is None:
        host_bytes = default_host_bytes() // num_shards
    cuda_options = CudaOptions(
        dtype=dtype,
        memory_fraction=options.memory_fraction or DEFAULT_MEMORY_FRACTION,
        host_bytes=host_bytes,
        max_model_len=options.max_model_len,
        max_step_tokens=options.max_step_tokens or _MAX_STEP_TOKENS,
        max_running=options.max_running,
        block_size=options.block_size,
        cold_start=options.cold_start,
        cpu_workers=options.cpu_workers,
        loads_popular=options.loads_popular,
    )
    # Of the first device; the others are taken to be like it.
    plan = _plan_memory(cuda_options, local.shape, torch.device("cuda", 0), weight_bytes(local, dtype))
    build = partial(_build_shard, Path(options.model), cuda_options, plan)
    executor: Executor
    if num_shards == 1:
        executor = build(WHOLE, SOLO, report)
    else:
        executor = start_parallel(
            build, count=num_shards, device="cuda", num_threads=torch.get_num_threads(), report=report
        )
    return _engine(cuda_options, plan, local.shape, executor, "cuda")


def build_cuda_core(
    config: ModelConfig,
    weights: ModelWeights,
    options: CudaOptions,
    *,
    read: ReadSlab | None = None,
    host_blocks: HostBlocks | None = None,
    collective: Collective = SOLO,
) -> Engine:
    """An engine over weights that are on the device already.

    `read`: how an adapter's weights come into the host's memory, if not from its files; `host_blocks`:
    instead of that memory.
    """
    keep_compiled_kernels()
    plan = _plan_memory(options, config.shape, weights.embedding_VH.device)
    device, memory = weights.embedding_VH.device, None
    if host_blocks is None:
        memory = _host_memory(options, device)
        host_blocks = _host_pool(config.shape, options.dtype, memory, read)
    executor = _build_executor(config, weights, options, plan, host_blocks, memory, collective)
    return _engine(options, plan, config.shape, executor, weights.embedding_VH.device.type)


@dataclass(frozen=True, kw_only=True, slots=True)
class _MemoryPlan:
    """Pages of the arena, and the longest context they and the model allow."""

    num_pages: int
    max_model_len: int


def _engine(
    options: CudaOptions, plan: _MemoryPlan, shape: ModelShape, executor: Executor, device: str
) -> Engine:
    return Engine(
        config=SchedulerConfig(
            max_model_len=plan.max_model_len,
            work=StepWork(
                max_tokens=options.max_step_tokens,
                position_cost=shape.attention_flops / shape.linear_flops,
            ),
            max_running=min(options.max_running, DECODE_ROWS[-1]),
            cold_start=options.cold_start,
            num_workers=_num_workers(options),
            loads_popular=options.loads_popular,
        ),
        memory=Arena(
            num_pages=plan.num_pages,
            page_bytes=page_bytes(shape, options.block_size, options.dtype),
            block_size=options.block_size,
            staging=Staging(options.host_bytes),
        ),
        costs=DriftWatch(known_costs(shape, device, options.dtype)),
        executor=executor,
    )


def _build_shard(
    folder: Path,
    options: CudaOptions,
    plan: _MemoryPlan,
    shard: Shard,
    collective: Collective,
    report: Progress,
) -> CudaExecutor:
    """Load a shard onto its device; every process of an engine does so with the same numbers."""

    def on_bytes(done: int, total: int) -> None:
        report("reading weights", done / max(total, 1))

    config, device = load_config(folder), torch.device("cuda", shard.index)
    local = shard.config(config)
    with ExitStack() as undo:
        compilation = KernelCompilation.begin(local, options.dtype, options.block_size, device)
        if compilation is not None:
            undo.callback(compilation.close)
        weights = _read_weights(folder, config, options.dtype, device, shard, on_bytes)
        report("allocating memory", 0.0)
        memory = _host_memory(options, device)
        host_blocks = _host_pool(local.shape, options.dtype, memory, shard=shard)
        executor = _build_executor(local, weights, options, plan, host_blocks, memory, collective)
        undo.callback(executor.close)
        if compilation is not None:
            compilation.finish(report)
        undo.pop_all()
    return executor


def _read_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    on_bytes: Callable[[int, int], None],
) -> ModelWeights:
    num_threads = min(num_cores(), MAX_THREADS)
    copies = WeightCopies(device, dtype)
    with ThreadPoolExecutor(num_threads, "weights", partial(use_device, device)) as threads:
        return load_weights(folder, config, dtype, on_bytes, shard, place=copies, threads=threads)


def _host_memory(options: CudaOptions, device: torch.device) -> HostMemory:
    return HostMemory(options.host_bytes, pinned=device.type == "cuda", shared=_num_workers(options) > 0)


def _host_pool(
    shape: ModelShape,
    dtype: torch.dtype,
    memory: HostMemory,
    read: ReadSlab | None = None,
    shard: Shard = WHOLE,
) -> HostPool:
    if read is not None:
        return HostPool(shape, dtype, memory, read)
    readers = SlabReaders(shard)
    return HostPool(shape, dtype, memory, readers, readers.close)


def _build_executor(
    config: ModelConfig,
    weights: ModelWeights,
    options: CudaOptions,
    plan: _MemoryPlan,
    host_blocks: HostBlocks,
    memory: HostMemory | None,
    collective: Collective,
) -> CudaExecutor:
    """`config` and `weights` are the shard's; `memory`: where adapters are on the host, if they are files.
    `host_blocks` are closed if it comes to nothing."""
    device, shape = weights.embedding_VH.device, config.shape
    with ExitStack() as undo:
        undo.callback(host_blocks.close)
        kernels = TritonKernels(shape, device)
        decoder = Decoder(config, weights, kernels, plan.max_model_len, collective)
        arena = DeviceArena(
            shape, num_pages=plan.num_pages, block_size=options.block_size, dtype=options.dtype, device=device
        )
        # Requests that end in a plan hold theirs until after its launch.
        num_seats = 2 * options.max_running + 2
        store = _build_store(shape, options, arena, device, host_blocks)
        num_workers = _num_workers(options)
        assist = None
        if num_workers > 0 and memory is not None and options.padded_to is None:
            assist = start_assist(shape, options.dtype, device, memory, num_workers, options.max_step_tokens)
            undo.callback(assist.close)
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
                assist=assist,
            ),
            builder=BatchBuilder(kernels, options.block_size),
            arena=arena,
            store=store,
            device=device,
            num_seats=num_seats,
            assist=assist,
        )
        undo.pop_all()
    return executor


def _build_store(
    shape: ModelShape, options: CudaOptions, arena: DeviceArena, device: torch.device, host_blocks: HostBlocks
) -> AdapterStore:
    padding = None
    if options.padded_to is not None:
        padding = Padding(shape=shape, dtype=options.dtype, max_rank=options.padded_to)
        host_blocks = PaddedBlocks(padding, host_blocks, pinned=device.type == "cuda")
    plan_groups = _group_planner(known_costs(shape, device.type, options.dtype))
    return AdapterStore(shape, options.dtype, device, arena, host_blocks, plan_groups, padding)


def _group_planner(costs: CostModel) -> PlanGroups:
    """Groups that a step with a short prompt waits least for; single layers where there is no bus."""
    if costs.bus is None:
        return lambda layer_bytes: (1,) * len(layer_bytes)
    return partial(costs.plan_groups, step_s=costs.step_s(_SHORT_PROMPT))


def _num_workers(options: CudaOptions) -> int:
    if options.cpu_workers is not None:
        return options.cpu_workers
    return default_num_workers(num_cores()) if options.cold_start is ColdStart.CPU_ASSIST else 0


def _plan_memory(
    options: CudaOptions, shape: ModelShape, device: torch.device, coming_bytes: int = 0
) -> _MemoryPlan:
    """`coming_bytes`: what will be put on the device beside the arena."""
    arena_bytes = options.arena_bytes
    if arena_bytes is None:
        arena_bytes = max(_free_bytes(device, options.memory_fraction) - coming_bytes, 0)
    # One page is the device's own, for padding.
    num_pages = arena_bytes // page_bytes(shape, options.block_size, options.dtype) - 1
    if num_pages < 2:
        raise CapacityError(
            f"{arena_bytes:,} bytes of device memory are left beside the model, too few for KV cache and "
            "adapters; raise --memory-fraction, or stop what else runs on the device"
        )
    capacity, wanted = num_pages * options.block_size, options.max_model_len
    if wanted is None:
        return _MemoryPlan(num_pages=num_pages, max_model_len=min(shape.max_position, capacity))
    if wanted > shape.max_position:
        raise ModelError(
            f"--max-model-len {wanted} is beyond the model's own context of {shape.max_position}"
        )
    if wanted > capacity:
        raise CapacityError(
            f"device memory holds {capacity} tokens beside the model, fewer than --max-model-len {wanted}; "
            "lower it, or raise --memory-fraction"
        )
    return _MemoryPlan(num_pages=num_pages, max_model_len=wanted)


def _free_bytes(device: torch.device, fraction: float) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * fraction) - (total - free) - _RESERVE_BYTES)
