"""Adapters as blocks of bytes, from their folders to the arena.

A block is an adapter's table first, then its weights as `adapters.slab` lays them out. The table's addresses
count from the block's own beginning, so a block means the same wherever it lies: it is put together once in
host memory, copied to the device in one go, and moved there by another copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from loraplex.adapters.slab import SlabLayout, slab_layout, touched_groups
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.modules import MODULE_INDEX, MODULES
from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_loader import read_slab
from loraplex.engine.cuda.device_arena import DeviceArena
from loraplex.engine.cuda.streams import Moment, SideStream
from loraplex.engine.executor import HostTier
from loraplex.kernels.lora import TABLE_COLUMNS, LoraWeights

ReadSlab = Callable[[AdapterSpec, SlabLayout, torch.Tensor], object]


class Padding(Protocol):
    """`padding.Padding`, for comparisons."""

    def num_bytes(self, spec: AdapterSpec) -> int: ...

    def offsets(self, spec: AdapterSpec) -> dict[int, int]:
        """Of the copies in an adapter's block."""
        ...


class HostBlocks(Protocol):
    """Adapters' blocks in host memory."""

    def __call__(self, spec: AdapterSpec) -> torch.Tensor:
        """The adapter's block, valid until the next call; on the loader's thread."""
        ...

    def tier(self) -> HostTier | None:
        """What is kept, and how much that may be; on any thread."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


def table_bytes(shape: ModelShape) -> int:
    return shape.num_layers * len(MODULES) * TABLE_COLUMNS * 8


def block_bytes(spec: AdapterSpec, shape: ModelShape, dtype: torch.dtype) -> int:
    """What an adapter takes on the device."""
    return table_bytes(shape) + slab_layout(spec, shape).num_elements * dtype.itemsize


def write_block(
    block: torch.Tensor, spec: AdapterSpec, shape: ModelShape, dtype: torch.dtype, read: ReadSlab = read_slab
) -> None:
    """Fill memory of `block_bytes` bytes with an adapter."""
    write_table(block, spec, shape, dtype)
    read(spec, slab_layout(spec, shape), block[table_bytes(shape) :].view(dtype))


def write_table(block: torch.Tensor, spec: AdapterSpec, shape: ModelShape, dtype: torch.dtype) -> None:
    """The kernels' table (`kernels.lora`), which the slab follows."""
    slab_start, element_bytes = table_bytes(shape), dtype.itemsize
    table = np.zeros((shape.num_layers, len(MODULES), TABLE_COLUMNS), dtype=np.int64)
    for layer, groups in enumerate(slab_layout(spec, shape).layers):
        for slots in groups.values():
            for slot in slots:
                table[layer, MODULE_INDEX[slot.lora.module]] = (
                    slab_start + slot.a_start * element_bytes,
                    slab_start + slot.b_start * element_bytes,
                    slot.lora.rank,
                    slot.out_start,
                    slot.out_features,
                    struct.unpack("i", struct.pack("f", slot.lora.scale))[0],
                )
    block[:slab_start] = torch.from_numpy(table.view(np.uint8).reshape(-1))


class AdapterStore:
    """Brings adapters into the arena on the loader's thread and a stream of its own: no step waits for it."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        arena: DeviceArena,
        host_blocks: HostBlocks,
        padding: Padding | None = None,
    ) -> None:
        """`padding`: how adapters are padded to their batches, if they are; `host_blocks` has them so."""
        self._padding = padding
        self._shape = shape
        self._dtype = dtype
        self._arena = arena
        self._host_blocks = host_blocks
        self._stream = SideStream(device)

    def num_bytes(self, spec: AdapterSpec) -> int:
        if self._padding is not None:
            return self._padding.num_bytes(spec)
        return block_bytes(spec, self._shape, self._dtype)

    def host_tier(self) -> HostTier | None:
        return self._host_blocks.tier()

    def load(self, spec: AdapterSpec, place: int, after: Moment | None) -> LoraWeights:
        """Copy a version to its place, not before that moment, and wait until it is there."""
        host = self._host_blocks(spec)
        with self._stream.entered():
            self._stream.wait_for(after)
            self._arena.span(place, host.numel()).copy_(host, non_blocking=True)
        self._stream.synchronize()
        return LoraWeights(
            groups=(),
            table_LM=self._table_at(place),
            max_rank=spec.max_rank,
            touched=touched_groups(spec),
            copies={} if self._padding is None else self._padding.offsets(spec),
        )

    def close(self) -> None:
        """After the last load."""
        self._host_blocks.close()

    def moved(self, weights: LoraWeights, place: int) -> LoraWeights:
        """The same adapter after its block was copied to another place."""
        return replace(weights, table_LM=self._table_at(place))

    def _table_at(self, place: int) -> torch.Tensor:
        table = self._arena.span(place, table_bytes(self._shape)).view(torch.int64)
        return table.view(self._shape.num_layers, len(MODULES), TABLE_COLUMNS)
