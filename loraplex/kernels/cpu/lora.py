"""LoRA for segments of a few rows: memory-bound work, one pass over each adapter's weights.

A work item is a segment, or one module of it if there are few segments. Its thread shrinks the segment's rows
with A into a small buffer, then expands with B transposed straight into the base output. Nothing is gathered
or padded: the cost depends on the adapter's own rank. Long segments are compute-bound and go to the matrix
library.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import numpy as np
from numba import carray, njit

from loraplex.kernels.cpu import team
from loraplex.kernels.cpu.blas import sgemm
from loraplex.kernels.cpu.intrinsics import bits_as_float32, claim, float32_array, int64_array, prefetch
from loraplex.kernels.cpu.vectors import FLOAT_BYTES, add_rows, dot
from loraplex.kernels.lora import TABLE_COLUMNS

_SEGMENT_COLUMNS = 3
_RANKS_AT_ONCE = 4
"""Rows of A to prefetch, and rows of B that stay in the L1 cache while every row of the segment uses them.
The weights of a step's adapters come from DRAM in many short streams, which hardware prefetch alone does not
keep up with."""


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def _shrink(x, x_stride, num_rows, in_features, a, rank, scale, shrunk):
    """Compute shrunk = scale * x A^T; every row of A is read once, for all rows of x."""
    for j in range(rank):
        a_row = float32_array(a + j * in_features * FLOAT_BYTES, in_features)
        prefetch(a + (j + _RANKS_AT_ONCE) * in_features * FLOAT_BYTES, in_features * FLOAT_BYTES)
        for i in range(num_rows):
            x_row = float32_array(x + i * x_stride * FLOAT_BYTES, in_features)
            shrunk[i * rank + j] = dot(a_row, x_row, in_features) * scale


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def _expand(y, y_stride, num_rows, out_features, b, rank, shrunk):
    """Compute y += shrunk B^T; a few rows of B at a time stay in the L1 cache for all rows of y."""
    for j in range(0, rank, _RANKS_AT_ONCE):
        count = min(_RANKS_AT_ONCE, rank - j)
        prefetch(b + (j + count) * out_features * FLOAT_BYTES, count * out_features * FLOAT_BYTES)
        for i in range(num_rows):
            y_row = float32_array(y + i * y_stride * FLOAT_BYTES, out_features)
            weights = shrunk[i * rank + j : i * rank + j + count]
            add_rows(y_row, out_features, weights, count, b + j * out_features * FLOAT_BYTES)


@njit(error_model="numpy")
def _add_segment(x, x_stride, y, y_stride, num_rows, in_features, modules, num_modules):
    """Compute all shrinks, then all expands: the order of the weights in memory."""
    total_rank = 0
    for m in range(num_modules):
        total_rank += modules[m * TABLE_COLUMNS + 2]
    if total_rank == 0:
        return
    shrunk = np.empty(num_rows * total_rank, dtype=np.float32)
    start = 0
    for m in range(num_modules):
        row = modules[m * TABLE_COLUMNS : (m + 1) * TABLE_COLUMNS]
        scale = bits_as_float32(np.int32(row[5]))
        _shrink(x, x_stride, num_rows, in_features, row[0], row[2], scale, shrunk[start:])
        start += num_rows * row[2]
    start = 0
    for m in range(num_modules):
        row = modules[m * TABLE_COLUMNS : (m + 1) * TABLE_COLUMNS]
        outputs = y + row[3] * FLOAT_BYTES
        _expand(outputs, y_stride, num_rows, row[4], row[1], row[2], shrunk[start:])
        start += num_rows * row[2]


@njit(error_model="numpy")
def _multiply_segment(routine, x, x_stride, y, y_stride, num_rows, in_features, modules, num_modules):
    """Do the same for many rows, by matrix products: one for all the shrinks, one for each expand."""
    total_rank = 0
    first = 0
    for m in range(num_modules):
        rank = modules[m * TABLE_COLUMNS + 2]
        if rank > 0 and total_rank == 0:
            first = modules[m * TABLE_COLUMNS]  # the A's of a group are stacked in one block
        total_rank += rank
    if total_rank == 0:
        return
    shrunk = np.empty(num_rows * total_rank, dtype=np.float32)
    address = shrunk.ctypes.data
    sgemm(
        routine, True, total_rank, num_rows, in_features, 1.0,
        first, in_features, x, x_stride, 0.0, address, total_rank,
    )  # fmt: skip
    start = 0
    for m in range(num_modules):
        row = modules[m * TABLE_COLUMNS : (m + 1) * TABLE_COLUMNS]
        rank = row[2]
        if rank > 0:
            scale = bits_as_float32(np.int32(row[5]))
            sgemm(
                routine, False, row[4], num_rows, rank, scale, row[1], row[4],
                address + start * FLOAT_BYTES, total_rank, 1.0, y + row[3] * FLOAT_BYTES, y_stride,
            )  # fmt: skip
        start += rank
    shrunk[0] = 0.0  # the array must outlive the calls that use its address


def _lora_products(block):
    args = carray(block, 11)
    x, x_stride, y, y_stride = args[1], args[2], args[3], args[4]
    in_features, first_row, num_modules = args[5], args[6], args[7]
    segments, num_segments, routine = args[8], args[9], args[10]
    while True:
        item = claim(block)
        if item >= num_segments:
            return
        segment = int64_array(segments + item * _SEGMENT_COLUMNS * 8, _SEGMENT_COLUMNS)
        start, num_rows, table = segment[0], segment[1], segment[2]
        _multiply_segment(
            routine,
            x + start * x_stride * FLOAT_BYTES,
            x_stride,
            y + start * y_stride * FLOAT_BYTES,
            y_stride,
            num_rows,
            in_features,
            int64_array(table + first_row * TABLE_COLUMNS * 8, num_modules * TABLE_COLUMNS),
            num_modules,
        )


LORA_PRODUCTS = team.kernel(_lora_products)
"""Arguments: x, x row stride, y, y row stride, in_features, the group's first row in an adapter's table,
number of modules in the group, segments (start row, number of rows, table address), number of segments,
address of sgemm."""


def _lora_rows(block):
    args = carray(block, 12)
    x, x_stride, y, y_stride = args[1], args[2], args[3], args[4]
    in_features, first_row, num_modules, modules_per_item = args[5], args[6], args[7], args[8]
    segments, num_segments = args[9], args[10]
    items_per_segment = num_modules // modules_per_item
    while True:
        item = claim(block)
        if item >= num_segments * items_per_segment:
            return
        segment = int64_array(segments + (item // items_per_segment) * _SEGMENT_COLUMNS * 8, _SEGMENT_COLUMNS)
        start, num_rows, table = segment[0], segment[1], segment[2]
        row = first_row + (item % items_per_segment) * modules_per_item
        _add_segment(
            x + start * x_stride * FLOAT_BYTES,
            x_stride,
            y + start * y_stride * FLOAT_BYTES,
            y_stride,
            num_rows,
            in_features,
            int64_array(table + row * TABLE_COLUMNS * 8, modules_per_item * TABLE_COLUMNS),
            modules_per_item,
        )


LORA_ROWS = team.kernel(_lora_rows)
"""Arguments: x, x row stride, y, y row stride, in_features, the group's first row in an adapter's table,
number of modules in the group, modules in a work item (1 or all), segments (start row, number of rows,
table address), number of segments."""
