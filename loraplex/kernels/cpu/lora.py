"""LoRA for segments of a few rows: memory-bound work, one pass over each adapter's weights.

A work item is one (segment, module). Its thread shrinks the segment's rows with A into a small
buffer, then expands with B transposed straight into the base output. Nothing is gathered or padded:
the cost is the adapter's own rank. Long segments are compute-bound and go to the matrix library.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import numpy as np
from numba import carray, njit

from loraplex.kernels.cpu import team
from loraplex.kernels.cpu.intrinsics import bits_as_float32, claim, float32_array, int64_array
from loraplex.kernels.cpu.vectors import FLOAT_BYTES, add_rows, dot
from loraplex.kernels.lora import TABLE_COLUMNS

_TABLE_ROW_BYTES = TABLE_COLUMNS * 8
_SEGMENT_COLUMNS = 3
_RANKS_AT_ONCE = 16  # rows of B that stay in the first cache while every row of the segment uses them


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def _shrink_expand(x, x_stride, y, y_stride, num_rows, in_features, a, b, rank, out_features, scale):
    """y += scale * (x A^T) B^T for a few rows given by address; A and B come from memory once."""
    shrunk = np.empty(num_rows * rank, dtype=np.float32)
    for j in range(rank):
        a_row = float32_array(a + j * in_features * FLOAT_BYTES, in_features)
        for i in range(num_rows):
            x_row = float32_array(x + i * x_stride * FLOAT_BYTES, in_features)
            shrunk[i * rank + j] = dot(a_row, x_row, in_features) * scale
    for j in range(0, rank, _RANKS_AT_ONCE):
        count = min(_RANKS_AT_ONCE, rank - j)
        for i in range(num_rows):
            y_row = float32_array(y + i * y_stride * FLOAT_BYTES, out_features)
            weights = shrunk[i * rank + j : i * rank + j + count]
            add_rows(y_row, out_features, weights, count, b + j * out_features * FLOAT_BYTES)


def _lora_rows(block):
    args = carray(block, 11)
    x, x_stride, y, y_stride = args[1], args[2], args[3], args[4]
    in_features, layer_row, first_module, num_modules = args[5], args[6], args[7], args[8]
    segments, num_segments = args[9], args[10]
    while True:
        item = claim(block)
        if item >= num_segments * num_modules:
            return
        segment = int64_array(segments + (item // num_modules) * _SEGMENT_COLUMNS * 8, _SEGMENT_COLUMNS)
        start, num_rows = segment[0], segment[1]
        module_row = layer_row + first_module + item % num_modules
        row = int64_array(segment[2] + module_row * _TABLE_ROW_BYTES, TABLE_COLUMNS)
        rank = row[2]
        if rank == 0:
            continue
        _shrink_expand(
            x + start * x_stride * FLOAT_BYTES,
            x_stride,
            y + (start * y_stride + row[3]) * FLOAT_BYTES,
            y_stride,
            num_rows,
            in_features,
            row[0],
            row[1],
            rank,
            row[4],
            bits_as_float32(np.int32(row[5])),
        )


LORA_ROWS = team.kernel(_lora_rows)
"""Arguments: x, x row stride, y, y row stride, in_features, layer * modules per layer, first module of
the group, number of modules in the group, segments (start row, number of rows, table address), count."""
