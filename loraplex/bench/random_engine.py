"""Builds an engine with random weights of a known shape, and adapters of given ranks: nothing is downloaded.

An engine's cost depends on shapes, not on values, so measurements hold for a real model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from loraplex.adapters.slab import SlabLayout, slab_layout
from loraplex.adapters.spec import AdapterSpec, LoraModule
from loraplex.core.batching import Batching, DelayBound
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError, ModelError
from loraplex.core.modules import module_names
from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_loader import slab_weights
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.engine.cpu_build import choose_kernels
from loraplex.engine.profile_subject import known_costs
from loraplex.engine.torch_executor import TorchExecutor
from loraplex.kernels.lora import LoraWeights
from loraplex.kernels.reference import TorchKernels
from loraplex.model.config import ModelConfig
from loraplex.model.decoder import Decoder, KVCache
from loraplex.model.shapes import config_of_shape, random_weights
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.work import StepWork

if TYPE_CHECKING:
    from loraplex.engine.cuda.bus import Stretch

_CPU_BLOCKS = 512
_CPU_ADAPTER_BYTES = 1 << 30
BLOCK_SIZE = 16
_HOST_BYTES = 4 << 30
_COUNTED_HOST_BYTES = 1 << 40
_SHARED_HOST_BYTES = 24 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomEngineOptions:
    """Options of a benchmark's engine.

    `distinct`: adapters have their own weights, also on the host; for small shapes. `memory_bytes`: for
    adapters, on a GPU together with the KV cache; None: a gigabyte, or what a GPU has. `padded_to`: on a GPU,
    pad adapters to the largest rank of their batch, up to this one. `compiled`: on a CPU, use the kernels of
    `serve`, not plain torch. `from_files`: adapters are read from their files. `cpu_workers`: processes that
    compute LoRA beside a GPU; each adapter then has host memory of its own. `max_copy_bytes_per_s`: slow
    copies to a GPU down to this rate. `runs_ahead`: on a CPU, launch the next step before collecting the
    last, as a GPU does; this gains nothing there. `batching`, `max_delay`, `max_running`: as in
    `SchedulerConfig`. `kv_swap_bytes`: on a GPU, host memory for keys and values.
    """

    shape: str
    device: str
    dtype: torch.dtype
    max_step_tokens: int = 2048
    memory_bytes: int | None = None
    padded_to: int | None = None
    distinct: bool = False
    cold_start: ColdStart = ColdStart.AUTO
    compiled: bool = False
    from_files: bool = False
    cpu_workers: int | None = None
    max_copy_bytes_per_s: float | None = None
    runs_ahead: bool = False
    batching: Batching = Batching.FCFS
    max_running: int = 256
    kv_swap_bytes: int = 0
    max_delay: DelayBound = field(default_factory=DelayBound)


def build_random_engine(options: RandomEngineOptions, config: ModelConfig | None = None) -> Engine:
    """Build the engine. `config` is that of a model outside the named shapes; `options.shape` is ignored
    then."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("there is no CUDA device here; give --device cpu")
    if config is None:
        config = config_of_shape(options.shape)
        check_shape(options.shape, options.device)
    weights = random_weights(config, options.dtype, device)
    if device.type == "cuda":
        from loraplex.engine.cuda.assemble import build_cuda_core
        from loraplex.engine.cuda.options import CudaOptions

        cuda_options = CudaOptions(
            dtype=options.dtype,
            arena_bytes=options.memory_bytes,
            padded_to=options.padded_to,
            max_step_tokens=options.max_step_tokens,
            host_bytes=_host_bytes(options),
            cold_start=options.cold_start,
            cpu_workers=options.cpu_workers,
            max_copy_bytes_per_s=options.max_copy_bytes_per_s,
            batching=options.batching,
            max_running=options.max_running,
            kv_swap_bytes=options.kv_swap_bytes,
            max_delay=options.max_delay,
        )
        if options.from_files:
            return build_cuda_core(config, weights, cuda_options)
        if options.distinct:
            return build_cuda_core(config, weights, cuda_options, read=_fill_distinctly)
        if options.cpu_workers:
            return build_cuda_core(config, weights, cuda_options, read=_FillOnce())
        blocks = _RandomBlocks(config.shape, options.dtype)
        return build_cuda_core(config, weights, cuda_options, host_blocks=blocks)
    shape = config.shape
    costs = None
    if options.batching.needs_costs:
        costs = DriftWatch(known_costs(shape, "cpu", options.dtype))
    kernels = choose_kernels(config, options.dtype) if options.compiled else TorchKernels()
    return Engine(
        config=SchedulerConfig(
            max_model_len=shape.max_position,
            work=StepWork(max_tokens=options.max_step_tokens),
            batching=options.batching,
            max_running=options.max_running,
            max_delay=options.max_delay,
        ),
        memory=SeparateMemory(
            num_blocks=_CPU_BLOCKS,
            block_size=BLOCK_SIZE,
            adapter_bytes=options.memory_bytes or _CPU_ADAPTER_BYTES,
        ),
        executor=TorchExecutor(
            decoder=Decoder(config, weights, kernels, shape.max_position),
            caches=[
                KVCache.zeros(shape, _CPU_BLOCKS, BLOCK_SIZE, options.dtype) for _ in range(shape.num_layers)
            ],
            builder=BatchBuilder(kernels, BLOCK_SIZE),
            dtype=options.dtype,
            runs_ahead=options.runs_ahead,
            read=None if options.from_files else lambda spec: _random_weights(spec, shape, options.dtype),
        ),
        costs=costs,
    )


def register(
    engine: Engine, specs: Sequence[AdapterSpec], *, staged: bool = True, prepared: bool = True
) -> tuple[str, ...]:
    """Register adapters. `staged`: all are in host memory when this returns, if they are loaded from there;
    with `ColdStart.CACHED`, on the device. `prepared`: all graphs for them are captured."""
    for spec in specs:
        engine.add_adapter(spec)
        if staged:
            engine.stage_adapter(spec.version)
    while engine.has_work():
        engine.step()
    if prepared:
        engine.warm_up()
    return tuple(spec.version for spec in specs)


def _host_bytes(options: RandomEngineOptions) -> int:
    """Return the budget for adapters in host memory. Of random blocks only one of a kind is there, however
    many are counted."""
    if options.distinct or options.from_files:
        return _HOST_BYTES
    return _SHARED_HOST_BYTES if options.cpu_workers else _COUNTED_HOST_BYTES


def check_shape(name: str, device: str) -> None:
    """Raise CapacityError for a shape that would take too long on a CPU."""
    if device == "cpu" and config_of_shape(name).shape.linear_flops > 1e9:
        raise CapacityError(f"the shape {name!r} is too large for --device cpu; try --shape tiny")


def random_specs(
    name: str, shape: str, *, num_adapters: int, ranks: Sequence[int], modules: str
) -> list[AdapterSpec]:
    """Return adapters without files, with the ranks in turn, on these modules of every layer."""
    return [
        random_spec(f"{name}-{index:04d}", config_of_shape(shape).shape, ranks[index % len(ranks)], names)
        for names in (module_names(modules),)
        for index in range(num_adapters)
    ]


def random_spec(name: str, shape: ModelShape, rank: int, modules: Sequence[str]) -> AdapterSpec:
    """Return an adapter without files, on these modules of every layer. Its version names its content, as
    that of a real adapter does."""
    loras = tuple(
        LoraModule(layer=layer, module=module, rank=rank, scale=1.0 / rank, a_name="", b_name="")
        for layer in range(shape.num_layers)
        for module in modules
    )
    num_params = sum(rank * (shape.in_features(m.module) + shape.out_features(m.module)) for m in loras)
    version = f"{name}-r{rank}-{'-'.join(modules)}"
    return AdapterSpec(version=version, path=Path(name), modules=loras, num_params=num_params)


def _random_weights(spec: AdapterSpec, shape: ModelShape, dtype: torch.dtype) -> LoraWeights:
    """Return random weights that are the same whenever a version is loaded, as from a file."""
    layout = slab_layout(spec, shape)
    slab = torch.empty(layout.num_elements, dtype=dtype)
    _fill_distinctly(spec, layout, slab)
    return slab_weights(slab, layout, spec.max_rank)


def _fill_distinctly(spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
    slab.normal_(std=0.02, generator=torch.Generator().manual_seed(crc32(spec.version.encode())))


class _FillOnce:
    """Fills slabs with random weights, unless the same memory was filled before: adapters that take the place
    of others have the same weights. Used by several threads."""

    def __init__(self) -> None:
        self._filled: dict[int, int] = {}  # address -> elements
        self._lock = threading.Lock()

    def __call__(self, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        with self._lock:
            known, self._filled[slab.data_ptr()] = self._filled.get(slab.data_ptr()), slab.numel()
        if known != slab.numel():
            _fill_slab(slab)


class _RandomBlocks:
    """`HostBlocks` with random weights. On the host, adapters of the same kind share weights, so that
    thousands fit; on the device each has its own memory. Each has its own table, since scales may differ."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._slabs: dict[tuple[tuple[int, str, int], ...], torch.Tensor] = {}
        self._parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # version -> table and slab
        self._lock = threading.Lock()

    def read(self, spec: AdapterSpec, place: int) -> None:
        from loraplex.engine.cuda.adapter_block import table_bytes, write_table

        with self._lock:
            if spec.version in self._parts:
                return
            layout, kind = slab_layout(spec, self._shape), _kind(spec)
            table = torch.empty(table_bytes(self._shape), dtype=torch.uint8, pin_memory=True)
            write_table(table, layout, self._shape, self._dtype)
            if kind not in self._slabs:
                slab = torch.empty(layout.num_elements, dtype=self._dtype, pin_memory=True)
                _fill_slab(slab)
                self._slabs[kind] = slab.view(torch.uint8)
            self._parts[spec.version] = table, self._slabs[kind]

    def parts(self, spec: AdapterSpec, place: int, begin: int, end: int) -> list[Stretch]:
        from loraplex.engine.cuda.bus import Stretch

        table, slab = self._parts[spec.version]
        split = table.numel()
        parts = [
            Stretch(table.data_ptr() + begin, min(end, split) - begin),
            Stretch(slab.data_ptr() + max(begin - split, 0), end - max(begin, split)),
        ]
        return [part for part in parts if part.num_bytes > 0]

    def passing(self, spec: AdapterSpec) -> torch.Tensor:
        self.read(spec, 0)
        return torch.cat(self._parts[spec.version])

    def prepare(self) -> bool:
        return False

    def close(self, *, frees_memory: bool = True) -> None:
        self._slabs.clear()
        self._parts.clear()


def _kind(spec: AdapterSpec) -> tuple[tuple[int, str, int], ...]:
    return tuple((lora.layer, lora.module, lora.rank) for lora in spec.modules)


def _fill_slab(slab: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(slab.numel())
    sample = torch.empty(min(1 << 20, slab.numel())).normal_(std=0.02, generator=generator).to(slab.dtype)
    for start in range(0, slab.numel(), sample.numel()):
        part = slab[start : start + sample.numel()]
        part.copy_(sample[: part.numel()])
