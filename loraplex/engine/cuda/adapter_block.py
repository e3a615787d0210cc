"""An adapter as one block of bytes: its table first, then its weights as `adapters.slab` lays them out.

The table's addresses are relative to the block's beginning, so a block is valid wherever it lies: it is built
once in host memory, copied to the device layer by layer, and moved there by another copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import torch

from loraplex.adapters.slab import SlabLayout, slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.modules import MODULE_INDEX, MODULES
from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_reads import ReadSlab
from loraplex.kernels.lora import TABLE_COLUMNS


def table_bytes(shape: ModelShape) -> int:
    return shape.num_layers * len(MODULES) * TABLE_COLUMNS * 8


def block_bytes(layout: SlabLayout, shape: ModelShape, dtype: torch.dtype) -> int:
    """Return the bytes that an adapter takes on the device."""
    return table_bytes(shape) + layout.num_elements * dtype.itemsize


def adapter_block(
    spec: AdapterSpec,
    shape: ModelShape,
    dtype: torch.dtype,
    read: ReadSlab,
    memory: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """Build and return an adapter's block. `read`: fills its slab; `memory`: allocates so many bytes."""
    layout = slab_layout(spec, shape)
    block = memory(block_bytes(layout, shape, dtype))
    write_table(block, layout, shape, dtype)
    read(spec, layout, block[table_bytes(shape) :].view(dtype))
    return block


def write_table(block: torch.Tensor, layout: SlabLayout, shape: ModelShape, dtype: torch.dtype) -> None:
    """Write the kernels' table (`kernels.lora`) to the beginning of the block; the slab follows it."""
    slab_start, element_bytes = table_bytes(shape), dtype.itemsize
    table = np.zeros((shape.num_layers, len(MODULES), TABLE_COLUMNS), dtype=np.int64)
    for layer, groups in enumerate(layout.layers):
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


def part_ends(layout: SlabLayout, shape: ModelShape, dtype: torch.dtype) -> list[int]:
    """Return the byte of the block where the table ends, then the byte where each layer ends."""
    cursor = table_bytes(shape)
    ends = [cursor]
    for groups in layout.layers:
        for slots in groups.values():
            last = slots[-1]
            b_end = last.b_start + last.lora.rank * last.out_features
            cursor = table_bytes(shape) + b_end * dtype.itemsize
        ends.append(cursor)
    return ends
