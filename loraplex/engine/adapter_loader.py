"""Reads adapters from disk into memory beside the running step."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from typing import Final

import numpy as np
import torch

from loraplex.adapters.fingerprint import weights_unchanged
from loraplex.adapters.slab import ModuleSlot, SlabLayout, slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.adapters.tensors import TensorInfo, read_header
from loraplex.core.errors import AdapterError, AdapterFormatError
from loraplex.core.shape import ModelShape
from loraplex.kernels.lora import LoraGroup, LoraPart, LoraWeights, host_weights
from loraplex.model.sharding import CUT_BY_INPUT, WHOLE, Shard

logger = logging.getLogger(__name__)

_SOURCE_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Load = Callable[[AdapterSpec], LoraWeights]
Read = Callable[[AdapterSpec], None]
"""Both run on the loader's threads, and raise AdapterError or OSError if the weights are not to be had. A
read puts them where they belong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """A load that ended: weights, or the reason why not. `read`: one that was to bring none."""

    version: str
    weights: LoraWeights | None = None
    error: str | None = None
    read: bool = False


class AdapterLoader:
    """A few threads that read adapters; results are collected by the engine's own thread."""

    def __init__(self, num_threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-loader")
        self._finished: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self.num_pending = 0

    def submit(self, sources: Sequence[AdapterSpec], load: Load) -> None:
        """Load one version from the first of its folders that still holds it."""
        self.num_pending += 1
        self._threads.submit(self._load, sources, load, False)

    def submit_read(self, sources: Sequence[AdapterSpec], read: Read) -> None:
        """The same, of a version that is only read."""
        self.num_pending += 1
        self._threads.submit(self._load, sources, read, True)

    def poll(self, timeout_s: float = 0.0) -> list[LoadResult]:
        """Loads that finished; waits for the first of them no longer than `timeout_s`."""
        results: list[LoadResult] = []
        try:
            if timeout_s > 0.0 and self.num_pending > 0:
                results.append(self._finished.get(timeout=timeout_s))
            while True:
                results.append(self._finished.get_nowait())
        except queue.Empty:
            pass
        self.num_pending -= len(results)
        return results

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _load(self, sources: Sequence[AdapterSpec], load: Load | Read, is_read: bool) -> None:
        version, reason = sources[0].version, ""
        for spec in sources:
            try:
                weights = load(spec)
            except AdapterError as error:
                reason = str(error)
            except OSError as error:
                reason = f"its files cannot be read ({error.strerror}); restore them or load it again"
            except Exception:  # a bug must fail the waiting requests, not leave them waiting
                reason = "it could not be loaded; the server's log says why"
                logger.exception("a bug while loading an adapter")
            else:
                self._finished.put(LoadResult(version=version, weights=weights, read=is_read))
                return
            # Clients are told the reason; the path is the operator's business.
            logger.warning("the adapter in %s was not loaded: %s", spec.path, reason)
        message = f"the adapter is not available: {reason}"
        self._finished.put(LoadResult(version=version, error=message, read=is_read))


def resident_bytes(spec: AdapterSpec, shape: ModelShape, dtype: torch.dtype) -> int:
    """What the adapter will take in memory."""
    return slab_layout(spec, shape).num_elements * dtype.itemsize


def read_weights(
    spec: AdapterSpec, shape: ModelShape, dtype: torch.dtype, shard: Shard = WHOLE
) -> LoraWeights:
    """A version, or a shard of it, as the CPU's kernels use it. `shape` is the shard's."""
    layout = slab_layout(spec, shape)
    slab = torch.empty(layout.num_elements, dtype=dtype)
    read_slab(spec, layout, slab, shard)
    return slab_weights(slab, layout, spec.max_rank)


def slab_weights(slab: torch.Tensor, layout: SlabLayout, max_rank: int) -> LoraWeights:
    """A slab in host memory as the CPU's kernels use it."""
    return host_weights(_views(slab, layout), max_rank)


def read_slab(spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor, shard: Shard = WHOLE) -> None:
    """Read a version's weights, or a shard of them, into a slab. `layout` is the shard's.

    The files must still be the ones that were hashed: a changed fingerprint is an error, since the
    weights would not be those of this version.
    """
    with FileIO(spec.weights_path) as file:
        _check_unchanged(spec, file)
        header = read_header(spec.weights_path, file)
        for slot in (slot for groups in layout.layers for slots in groups.values() for slot in slots):
            rank, by_input = slot.lora.rank, slot.lora.module in CUT_BY_INPUT
            a_RI = _read(file, header.tensors[slot.lora.a_name], header.data_start, WHOLE)
            if by_input:
                a_RI = a_RI[:, shard.part(a_RI.shape[1])]
            _fill(slab[slot.a_start : slot.a_start + a_RI.numel()].view(rank, slot.in_features), a_RI)
            b_rows = WHOLE if by_input else shard
            b_OR = _read(file, header.tensors[slot.lora.b_name], header.data_start, b_rows)
            _fill(slab[slot.b_start : slot.b_start + b_OR.numel()].view(rank, slot.out_features), b_OR.t())
        _check_unchanged(spec, file)


def _check_unchanged(spec: AdapterSpec, file: FileIO) -> None:
    if not weights_unchanged(spec, os.fstat(file.fileno())):
        raise AdapterFormatError(
            "its files changed on disk after it was registered; load it again under its name"
        )


def _read(file: FileIO, info: TensorInfo, data_start: int, shard: Shard) -> torch.Tensor:
    """A shard's rows of a matrix."""
    # Read, not mapped: a mapped file that is cut short meanwhile would kill the process.
    part = shard.part(info.num_bytes)
    file.seek(data_start + info.begin + part.start)
    data = bytearray(part.stop - part.start)
    if file.readinto(data) != len(data):
        raise AdapterFormatError("its weights file ends too early; it was changed while being read")
    return torch.frombuffer(data, dtype=_SOURCE_DTYPES[info.dtype]).view(-1, info.shape[1])


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """target = source, converted. By numpy where it can: its copy stays on this thread, while torch's
    would wake the thread team that the running step is using."""
    if target.dtype == source.dtype == torch.float32:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def _views(slab: torch.Tensor, layout: SlabLayout) -> tuple[dict[str, LoraGroup], ...]:
    return tuple(
        {name: _group_view(slab, slots) for name, slots in groups.items()} for groups in layout.layers
    )


def _group_view(slab: torch.Tensor, slots: Sequence[ModuleSlot]) -> LoraGroup:
    total_rank, in_features = sum(slot.lora.rank for slot in slots), slots[0].in_features
    a_start = slots[0].a_start
    parts = tuple(
        LoraPart(
            module=slot.lora.module,
            b_t_RO=slab[slot.b_start : slot.b_start + slot.lora.rank * slot.out_features].view(
                slot.lora.rank, slot.out_features
            ),
            scale=slot.lora.scale,
            rank_start=slot.rank_start,
            rank_end=slot.rank_start + slot.lora.rank,
            out_start=slot.out_start,
            out_end=slot.out_start + slot.out_features,
        )
        for slot in slots
    )
    a_RI = slab[a_start : a_start + total_rank * in_features].view(total_rank, in_features)
    return LoraGroup(a_RI=a_RI, parts=parts)
