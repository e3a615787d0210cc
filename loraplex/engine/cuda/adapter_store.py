"""Brings adapters onto the device, on the loader's thread and a stream of its own: no step waits for it.

An adapter is one block of device memory, its table first, then its weights as `adapters.slab` lays them
out. It is put together in pinned host memory and copied in one go.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from loraplex.adapters.slab import SlabLayout, slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.modules import MODULE_INDEX, MODULES
from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_loader import read_slab
from loraplex.engine.cuda.streams import SideStream
from loraplex.kernels.lora import TABLE_COLUMNS, LoraWeights

ReadSlab = Callable[[AdapterSpec, SlabLayout, torch.Tensor], None]


def table_bytes(shape: ModelShape) -> int:
    return shape.num_layers * len(MODULES) * TABLE_COLUMNS * 8


def block_bytes(spec: AdapterSpec, shape: ModelShape, dtype: torch.dtype) -> int:
    """What an adapter takes on the device."""
    return table_bytes(shape) + slab_layout(spec, shape).num_elements * dtype.itemsize


class HostBlocks:
    """Adapters in pinned host memory: the table's place first, then the weights."""

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, *, pinned: bool, read: ReadSlab = read_slab
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._pinned = pinned
        self._read = read

    def __call__(self, spec: AdapterSpec) -> torch.Tensor:
        num_bytes = block_bytes(spec, self._shape, self._dtype)
        block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        weights = block[table_bytes(self._shape) :].view(self._dtype)
        self._read(spec, slab_layout(spec, self._shape), weights)
        return block


class DeviceReader:
    """Copies versions from the host's blocks to the device."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        host_block: Callable[[AdapterSpec], torch.Tensor],
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._host_block = host_block
        self._stream = SideStream(device)

    def __call__(self, spec: AdapterSpec) -> LoraWeights:
        layout = slab_layout(spec, self._shape)
        header = table_bytes(self._shape)
        host = self._host_block(spec)
        with self._stream.entered():
            block = torch.empty(host.shape, dtype=host.dtype, device=self._device)
            table = slab_table(layout, self._shape, block.data_ptr() + header, self._dtype.itemsize)
            host[:header] = torch.from_numpy(table.view(np.uint8).reshape(-1))
            block.copy_(host, non_blocking=True)
        self._stream.synchronize()
        return LoraWeights(
            groups=(),
            # A view: the whole block lives as long as it.
            table_LM=block[:header].view(torch.int64).view(table.shape),
            max_rank=spec.max_rank,
            touched=frozenset(group for groups in layout.layers for group in groups),
        )


def slab_table(
    layout: SlabLayout, shape: ModelShape, address: int, element_bytes: int
) -> npt.NDArray[np.int64]:
    """The kernels' table (`kernels.lora`) of a slab that stands at `address`."""
    table = np.zeros((shape.num_layers, len(MODULES), TABLE_COLUMNS), dtype=np.int64)
    for layer, groups in enumerate(layout.layers):
        for slots in groups.values():
            for slot in slots:
                table[layer, MODULE_INDEX[slot.lora.module]] = (
                    address + slot.a_start * element_bytes,
                    address + slot.b_start * element_bytes,
                    slot.lora.rank,
                    slot.out_start,
                    slot.out_features,
                    struct.unpack("i", struct.pack("f", slot.lora.scale))[0],
                )
    return table
