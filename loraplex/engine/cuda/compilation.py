"""Compiles every kernel that serving can need before the first request, several at a time.

A model without memory (torch's meta device) runs steps of padding whose launches are collected instead of
executed. That needs neither weights nor the device, so it runs while the weights are read. Triton caches
compiled kernels on disk for the next start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from loraplex.core.errors import KernelError
from loraplex.core.modules import GROUPS, MODULES
from loraplex.core.paths import cache_dir
from loraplex.core.shape import ModelShape
from loraplex.engine.cuda.cpu_assist import meta_memory
from loraplex.engine.cuda.device_arena import DeviceArena
from loraplex.engine.cuda.graph_queue import GraphKey
from loraplex.engine.cuda.step_runner import StepRunner
from loraplex.engine.cuda.step_sizes import (
    DECODE_ROWS,
    MIXED_DECODES,
    MIXED_ROWS,
    all_graph_sizes,
    decode_sizes,
    mixed_sizes,
)
from loraplex.engine.cuda.streams import use_device
from loraplex.engine.cuda.triton_hash import hash_triton
from loraplex.engine.machine import num_cores
from loraplex.engine.parallel.messages import Progress
from loraplex.kernels.lora import TABLE_COLUMNS, LoraWeights
from loraplex.kernels.triton.decode_attention import choose_num_splits, has_many_programs
from loraplex.kernels.triton.kernel import CollectedLaunch, collect_launches
from loraplex.kernels.triton.launcher_modules import load_modules_apart
from loraplex.kernels.triton.triton_kernels import TritonKernels, multiprocessors
from loraplex.model.config import ModelConfig
from loraplex.model.decoder import Decoder
from loraplex.model.shapes import meta_weights
from loraplex.perf.assist_split import MAX_SPANS

logger = logging.getLogger(__name__)

_META: Final = torch.device("meta")
_MAX_THREADS: Final = 16
_LAYERS: Final = 2
_PAGES: Final = 2
_TABLE_WIDTH: Final = 8
_PROMPT_ROWS: Final = (64, MIXED_ROWS[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledFor:
    """The target of a compilation: a shard of a model, the layout of its memory, the number of CPU workers,
    and whether adapters are merged."""

    config: ModelConfig
    dtype: torch.dtype
    block_size: int
    num_sms: int
    num_workers: int = 0
    merges: bool = False


class KernelCompilation:
    """A compilation in threads, which starts when it is constructed. `finish` waits for them."""

    def __init__(self, wanted: CompiledFor, device: torch.device) -> None:
        keep_compiled_kernels()
        load_modules_apart()
        self._threads = ThreadPoolExecutor(
            max_workers=max(2, min(num_cores(), _MAX_THREADS)),
            thread_name_prefix="compile",
            initializer=partial(use_device, device),
        )
        self._submitted: Future[list[Future[None]]] = self._threads.submit(self._submit, wanted)

    @classmethod
    def begin(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        block_size: int,
        device: torch.device,
        num_workers: int = 0,
        *,
        merges: bool = False,
    ) -> KernelCompilation | None:
        """Start to compile; None where kernels are interpreted and there is nothing to compile."""
        if device.type != "cuda":
            return None
        wanted = CompiledFor(
            config=config,
            dtype=dtype,
            block_size=block_size,
            num_sms=multiprocessors(device),
            num_workers=num_workers,
            merges=merges,
        )
        return cls(wanted, device)

    def finish(self, report: Progress) -> None:
        """Wait until all kernels are compiled and loaded. A failure is logged: the kernel may never be
        needed, and a step that does need it raises the error again."""
        report("compiling kernels", 0.0)
        futures = self._submitted.result()
        for done, future in enumerate(as_completed(futures), 1):
            try:
                future.result()
            except KernelError as error:
                logger.warning("%s", error)
            report("compiling kernels", done / len(futures))
        self._threads.shutdown()

    def close(self) -> None:
        """Cancel what has not begun; does not wait for the rest."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, wanted: CompiledFor) -> list[Future[None]]:
        launches = needed_launches(wanted)
        for launch in launches:
            launch.kernel.hash()  # in one thread, one after the other: see `Kernel.hash`
        hash_triton()
        return [self._threads.submit(launch.compile) for launch in launches]


def needed_launches(wanted: CompiledFor) -> list[CollectedLaunch]:
    """Return one launch of every variant of every kernel that steps can need. Variants do not depend on the
    number of layers, so the model has only two, which takes a fraction of the time."""
    config = wanted.config
    config = replace(config, shape=replace(config.shape, num_layers=min(config.shape.num_layers, _LAYERS)))
    shape = config.shape
    kernels = TritonKernels(shape, _META, wanted.num_sms)
    arena = DeviceArena(
        shape, num_pages=_PAGES, block_size=wanted.block_size, dtype=wanted.dtype, device=_META
    )
    decoder = Decoder(config, meta_weights(config, wanted.dtype), kernels, wanted.block_size)
    runner = StepRunner(
        decoder=decoder,
        caches=arena.caches,
        num_seats=1,
        max_blocks=_TABLE_WIDTH,
        scratch_slot=arena.scratch_slot,
        ticket_1=torch.empty(1, dtype=torch.int64, device=_META),
        device=_META,
        recorder=None,
        assist=meta_memory(wanted.dtype, wanted.num_workers) if wanted.num_workers > 0 else None,
    )
    with collect_launches() as found:
        for key in _all_variants(shape, wanted.num_sms, assisted=wanted.num_workers > 0):
            runner.launch_padding(key)
        if wanted.merges:
            decoder.merge(_meta_adapter(shape))
    return list(found.values())


def _all_variants(shape: ModelShape, num_sms: int, *, assisted: bool) -> Iterator[GraphKey]:
    """Yield steps that together launch every variant."""
    groups = frozenset(GROUPS)
    by_attention = {}
    for decodes in range(1, DECODE_ROWS[-1]):
        num_splits = choose_num_splits(decodes, shape.num_kv_heads, num_sms)
        by_attention[num_splits, has_many_programs(decodes, shape.num_kv_heads, num_splits)] = decodes
    for rows in {1, DECODE_ROWS[-1], *by_attention.values()}:  # few tiles, many, and every kind of attention
        yield GraphKey(decode_sizes(rows, _TABLE_WIDTH), groups, False)
    for rows in (1, DECODE_ROWS[-1]):
        yield GraphKey(decode_sizes(rows, _TABLE_WIDTH), groups, True)
    for rows in _PROMPT_ROWS:
        mixed = mixed_sizes(rows, MIXED_DECODES[0], 1, _TABLE_WIDTH, shape.num_layers)
        yield GraphKey(mixed, groups, False)
    if assisted:
        # One of the kernels is compiled for each power of two of tiles.
        sizes = [size for size in all_graph_sizes(_TABLE_WIDTH, shape.num_layers) if size.spans > 0]
        for size in {(size.span_tiles - 1).bit_length(): size for size in sizes}.values():
            yield GraphKey(replace(size, assists=MAX_SPANS), groups, False)


def _meta_adapter(shape: ModelShape) -> LoraWeights:
    """Return an adapter without memory that touches all linears."""
    table_LM = torch.empty(shape.num_layers, len(MODULES), TABLE_COLUMNS, dtype=torch.int64, device=_META)
    return LoraWeights(groups=(), table_LM=table_LM, max_rank=1, touched=frozenset(GROUPS))


def keep_compiled_kernels() -> None:
    """Make Triton cache compiled kernels in our cache folder. Its own environment variables take precedence,
    and its own folder remains in use if ours cannot be written."""
    if "TRITON_CACHE_DIR" in os.environ or "TRITON_HOME" in os.environ:
        return
    folder = cache_dir() / "triton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ["TRITON_CACHE_DIR"] = str(folder)
