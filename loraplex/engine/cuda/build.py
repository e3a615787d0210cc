"""Begins to build the engine of a CUDA device, or of several that share a model: plans memory and starts to
read the weights. The rest needs Triton (`assemble`), which is imported while the weights are read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from loraplex.engine.cuda.costs import CudaCosts, cuda_costs
from loraplex.engine.cuda.host_memory import default_host_bytes
from loraplex.engine.cuda.memory_plan import MemoryPlan, plan_memory
from loraplex.engine.cuda.options import DEFAULT_MEMORY_FRACTION, MAX_STEP_TOKENS, CudaOptions
from loraplex.engine.cuda.weight_reading import WeightReading
from loraplex.engine.grammars import Grammars
from loraplex.engine.parallel.messages import Progress
from loraplex.engine.parallel.start import start_parallel
from loraplex.model.collective import SOLO, Collective
from loraplex.model.config import ModelConfig, load_config
from loraplex.model.sharding import WHOLE, Shard
from loraplex.model.weights import weight_bytes

if TYPE_CHECKING:
    from loraplex.engine.core import Engine
    from loraplex.engine.cuda.executor import CudaExecutor
    from loraplex.engine.executor import Executor
    from loraplex.engine.options import EngineOptions
    from loraplex.engine.peers import Peers

_SWITCH_INTERVAL_S: Final = 0.0005


def build_cuda_engine(
    options: EngineOptions,
    config: ModelConfig,
    dtype: torch.dtype,
    report: Progress,
    peers: Peers | None = None,
) -> Engine:
    """Return an engine over a checkpoint: `options.model` is a folder, and `config` the whole model's.

    `peers`: other replicas that adapters may be copied from; engines of several devices read files instead.
    """
    num_shards = options.tensor_parallel
    local = Shard(index=0, count=num_shards).config(config)
    host_bytes = options.host_adapter_memory_bytes
    if host_bytes is None:
        host_bytes = int(default_host_bytes() * options.memory_share) // num_shards
    cuda_options = CudaOptions(
        dtype=dtype,
        memory_fraction=options.memory_fraction or DEFAULT_MEMORY_FRACTION,
        host_bytes=host_bytes,
        max_model_len=options.max_model_len,
        max_step_tokens=options.max_step_tokens or MAX_STEP_TOKENS,
        max_running=options.max_running,
        block_size=options.block_size,
        cold_start=options.cold_start,
        cpu_workers=options.cpu_workers if num_shards == 1 else 0,
        max_cpu_workers=options.max_cpu_workers,
        loads_popular=options.loads_popular,
        batching=options.batching,
        max_delay=options.max_delay,
        max_borrowing=options.max_borrowing,
        kv_swap_bytes=options.kv_swap_memory_bytes or 0,
    )
    # Planned for the first device; the others are assumed to be like it.
    plan = plan_memory(cuda_options, local.shape, torch.device("cuda", 0), weight_bytes(local, dtype))
    costs = cuda_costs(cuda_options, local.shape, "cuda")
    build = partial(_build_shard, Path(options.model), cuda_options, costs, plan)
    executor: Executor
    if num_shards == 1:
        executor = build(WHOLE, SOLO, report, peers=peers)
    else:
        executor = start_parallel(
            build, count=num_shards, device="cuda", num_threads=torch.get_num_threads(), report=report
        )
    from loraplex.engine.cuda.assemble import assemble_engine  # not at the top: see there

    grammars = Grammars.of_model(Path(options.model), config)
    return assemble_engine(cuda_options, costs, plan, local.shape, executor, grammars)


def _build_shard(
    folder: Path,
    options: CudaOptions,
    costs: CudaCosts,
    plan: MemoryPlan,
    shard: Shard,
    collective: Collective,
    report: Progress,
    peers: Peers | None = None,
) -> CudaExecutor:
    """Load a shard onto its device; every process of an engine does so with the same numbers."""
    config, device = load_config(folder), torch.device("cuda", shard.index)
    with ExitStack() as closing:
        closing.enter_context(_quick_turns())
        reading = WeightReading(folder, config, options.dtype, device, shard)
        closing.callback(reading.close)
        tokenizer = Grammars.of_model(folder, config).prepare()
        # Not at the top: Triton takes a second to import.
        from loraplex.engine.cuda.assemble import assemble_shard

        local = shard.config(config)
        executor = assemble_shard(shard, local, options, costs, plan, reading, collective, report, peers)
        tokenizer.result()
        return executor


@contextmanager
def _quick_turns() -> Iterator[None]:
    """Shorten the interpreter's switch interval, so that threads that read or compile wait less for its lock:
    most need it briefly, but those that load compiled kernels hold it for the whole interval."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
