"""Engines on a CPU that swap keys and values as a GPU's do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from cuda_engines import BLOCK_SIZE, CONFIG, SHAPE, fill_slab, weights

from loraplex.adapters.slab import slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.engine.adapter_loader import slab_weights
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.engine.cuda.device_arena import DeviceArena, page_bytes
from loraplex.engine.cuda.kv_swap import KVSwap
from loraplex.engine.cuda.streams import Moment
from loraplex.engine.executor import SwapEvent
from loraplex.engine.torch_executor import TorchExecutor
from loraplex.kernels.lora import LoraWeights
from loraplex.kernels.reference import TorchKernels
from loraplex.model.decoder import Decoder
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.host_kv import HostKV
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.plan import BlockCopy
from loraplex.scheduling.work import StepWork

PAGE_BYTES = page_bytes(SHAPE, BLOCK_SIZE, torch.float32)
CPU = torch.device("cpu")


def swap_of(num_blocks: int, num_pages: int = 8) -> tuple[DeviceArena, KVSwap]:
    arena = DeviceArena(SHAPE, num_pages=num_pages, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
    return arena, KVSwap(arena, num_blocks=num_blocks, block_bytes=PAGE_BYTES, device=CPU)


class SwappingExecutor(TorchExecutor):
    """The plain executor, over the memory of a GPU's arena and with its host tier: a test of hundreds of
    steps, which would take long with interpreted kernels."""

    def __init__(self, kv_swap: KVSwap, **options: Any) -> None:
        super().__init__(**options)
        self.kv_swap = kv_swap

    def swap(self, outs: Sequence[BlockCopy], ins: Sequence[BlockCopy]) -> None:
        self.kv_swap.start(outs, ins, after=Moment(CPU))

    def poll_swaps(self) -> Sequence[SwapEvent]:
        return self.kv_swap.poll()

    @property
    def num_pending_loads(self) -> int:
        return super().num_pending_loads + self.kv_swap.num_pending


@lru_cache(maxsize=1)
def decoder() -> Decoder:
    return Decoder(CONFIG, weights(), TorchKernels(), 160)  # type: ignore[arg-type]


def plain_engine(
    num_blocks: int,
    num_host: int,
    specs: Sequence[AdapterSpec],
    *,
    adapter_bytes: int = 1 << 24,
    runs_ahead: bool = False,
    costs: DriftWatch | None = None,
) -> Engine:
    """`num_host`: blocks of its host tier, 0 for none."""
    arena, kv_swap = swap_of(max(num_host, 1), num_blocks)
    engine = Engine(
        config=SchedulerConfig(max_model_len=160, work=StepWork(max_tokens=48), max_running=6),
        memory=SeparateMemory(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            adapter_bytes=adapter_bytes,
            host_kv=HostKV(num_host, PAGE_BYTES) if num_host else None,
        ),
        executor=SwappingExecutor(
            kv_swap,
            decoder=decoder(),
            caches=arena.caches,
            builder=BatchBuilder(TorchKernels(), BLOCK_SIZE),
            dtype=torch.float32,
            read=read,
            runs_ahead=runs_ahead,
        ),
        costs=costs,
    )
    for spec in specs:
        engine.add_adapter(spec)
    return engine


def read(spec: AdapterSpec) -> LoraWeights:
    layout = slab_layout(spec, SHAPE)
    slab = torch.empty(layout.num_elements)
    fill_slab(spec, layout, slab)
    return slab_weights(slab, layout, spec.max_rank)
