"""Lookup of a program's weights in the LoRA kernels.

Every adapter has a table in device memory (`kernels.lora`), whose addresses are relative to the table itself,
so that an adapter can be moved. Once per step, the tables of its segments are gathered by table row, with
absolute addresses, so that a program can compute the address of an entry: one memory access
before the weights, not three.

    segments (N, 2)                     first row, number of rows (0: nothing to do)
    tables   (N,)                       address of the adapter's table
    entries  (layers * modules, N, 6)   the segments' table rows, gathered

A launch depends only on N, so a captured graph serves any adapters of later steps.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.core.modules import GROUPS, MODULE_INDEX, MODULES
from loraplex.kernels.lora import TABLE_COLUMNS
from loraplex.kernels.triton.kernel import Kernel

COLUMNS = tl.constexpr(TABLE_COLUMNS)
_BLOCK = 1024


def first_row(layer: int, group: str) -> int:
    """Return the row of an adapter's table at which a group's modules begin."""
    return layer * len(MODULES) + MODULE_INDEX[GROUPS[group][0]]


@triton.jit
def segment_of(segments):
    """Return the first row and number of rows of this program's segment."""
    segment = segments + tl.program_id(0) * 2
    return tl.load(segment), tl.load(segment + 1)


@triton.jit
def entry_of(entries, table_row, segment, num_segments):
    """Return the address of a segment's table row."""
    return entries + (table_row * num_segments + segment) * COLUMNS


@triton.jit
def group_rank(entry, num_segments, NUM_MODULES: tl.constexpr):
    """Return the address of the stacked A's of the group that begins at this entry, and their number of
    rows."""
    address = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.int64)
    for m in tl.static_range(NUM_MODULES):
        at = entry + m * num_segments * COLUMNS
        rank = tl.load(at + 2)
        first = tl.load(at)
        address = tl.where((total == 0) & (rank > 0), first, address)
        total += rank
    return address, total


@triton.jit
def weights_at(address, dtype: tl.constexpr, ROW: tl.constexpr):
    """Return a pointer to rows of weights. Slabs are aligned; if their rows are, loads can be 16 bytes
    wide."""
    pointer = address.to(tl.pointer_type(dtype))
    if ROW % 8 == 0:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def rank_before(entry, num_segments, module):
    """Return the number of rows of the stacked A's that belong to the group's modules before this one.
    `entry`: at which the group begins."""
    first = tl.load(entry + 2, mask=module > 0, other=0)
    second = tl.load(entry + num_segments * COLUMNS + 2, mask=module > 1, other=0)
    return first + second


@triton.jit
def module_of_block(block, OUT0: tl.constexpr, OUT1: tl.constexpr, OUT2: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return which module a block of output columns belongs to; modules occupy whole blocks, in order.

    Returns the module, the block within it, its width, and its first column in the group's output.
    """
    blocks0: tl.constexpr = (OUT0 + BLOCK_N - 1) // BLOCK_N
    blocks1: tl.constexpr = (OUT1 + BLOCK_N - 1) // BLOCK_N
    module = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    before = tl.where(module == 0, 0, tl.where(module == 1, blocks0, blocks0 + blocks1))
    out = tl.where(module == 0, OUT0, tl.where(module == 1, OUT1, OUT2))
    out_start = tl.where(module == 0, 0, tl.where(module == 1, OUT0, OUT0 + OUT1))
    if (OUT0 | OUT1 | OUT2) % 8 == 0:  # the compiler knows it of each, but not of the selected one
        out = tl.multiple_of(out, 8)
        out_start = tl.multiple_of(out_start, 8)
    return module, block - before, out, out_start


@Kernel
@triton.jit(
    do_not_specialize=["num_values"],  # it depends on the number of layers
    do_not_specialize_on_alignment=["segments", "tables", "entries"],
)
def _gather(segments, tables, entries, num_values, BLOCK: tl.constexpr):
    _, num_rows = segment_of(segments)
    if num_rows == 0:
        return
    address = tl.load(tables + tl.program_id(0))
    table = address.to(tl.pointer_type(tl.int64))
    values = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = values < num_values
    rows, columns = values // COLUMNS, values % COLUMNS
    target = entries + (rows * tl.num_programs(0) + tl.program_id(0)) * COLUMNS + columns
    found = tl.load(table + values, mask=mask, other=0)
    # The first two columns are the addresses of A and B.
    tl.store(target, found + tl.where(columns < 2, address, 0), mask=mask)


def gather_entries(segments_N2: torch.Tensor, tables_N: torch.Tensor, entries: torch.Tensor) -> None:
    """Gather the tables of a step's segments; entries of empty segments are not written."""
    num_values = entries.shape[0] * entries.shape[2]
    _gather[(segments_N2.shape[0], triton.cdiv(num_values, _BLOCK))](
        segments_N2, tables_N, entries, num_values, BLOCK=_BLOCK
    )
