"""The LoRA product of a few rows in bfloat16 on one core, computed with matrix tiles.

It reads the weights in place and is compiled once for all sizes. Rows are processed in blocks of 32: x is
packed for the tiles once for all modules that share it; A is loaded into tiles from its place; B is
interleaved, multiplied and written out in panels of a few columns.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numba import carray, njit

from loraplex.kernels.cpu import team
from loraplex.kernels.cpu.amx import (
    accumulate,
    configure_tiles,
    has_amx,
    interleave,
    release_tiles,
    scale_and_round_16,
    scale_and_round_32,
    store_sums,
    transpose_tile,
    zero_line,
    zero_sums,
)
from loraplex.kernels.cpu.intrinsics import bits_as_float32, int64_array

PART_WORDS = 7
"""A's address, B_t's address, rank, bits of the float32 scale, y's address, y's bytes a row, out_features."""
_HEAD_WORDS = 6
_BLOCK_ROWS = 32
_PANEL = 64
_LINE = 64


def amx_lora() -> Callable[..., None] | None:
    """Return the kernel, or None on a machine without such tiles. See `multiply` for its argument block."""
    if not has_amx():
        return None
    return _compiled()


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(team.kernel(multiply))


def takes(in_features: int, out_features: int) -> bool:
    """Return whether the sizes fill whole tiles; any rank is allowed."""
    return in_features % 32 == 0 and out_features % 32 == 0


def scratch_bytes(in_features: int, max_rank: int) -> int:
    """Return the bytes of scratch memory that a call needs; its contents need not be kept between calls."""
    depth = -(-max_rank // 32) * 32
    return (
        2 * _LINE
        + _BLOCK_ROWS * in_features * 2
        + depth * _BLOCK_ROWS * 4
        + 16 * _LINE
        + depth * _BLOCK_ROWS * 2
        + depth * _PANEL * 2
        + _BLOCK_ROWS * 32 * 4
    )


def multiply(block):
    """Compute y = scale * (x A^T) B_t for every part.

    The block: x's address, its bytes per row, number of rows, in_features, number of parts, scratch memory
    aligned to a cache line, then the parts.
    """
    head = carray(block, _HEAD_WORDS)
    x, x_stride, num_rows = head[0], head[1], head[2]
    in_features, num_parts, scratch = head[3], head[4], head[5]
    parts = carray(block, _HEAD_WORDS + num_parts * PART_WORDS)[_HEAD_WORDS:]
    config, zeros = scratch, scratch + _LINE
    for line in range(2):
        zero_line(scratch + line * _LINE)
    packed = scratch + 2 * _LINE
    shrunk = packed + _BLOCK_ROWS * in_features * 2
    for start in range(0, num_rows, _BLOCK_ROWS):
        rows = min(num_rows - start, _BLOCK_ROWS)
        _pack_x(x + start * x_stride, x_stride, rows, in_features, packed)
        for index in range(num_parts):
            part = parts[index * PART_WORDS :]
            a, rank, scale = part[0], part[2], bits_as_float32(np.int32(part[3]))
            depth = (rank + 31) // 32 * 32
            corner = shrunk + depth * _BLOCK_ROWS * 4
            left = corner + 16 * _LINE
            panel = left + depth * _BLOCK_ROWS * 2
            _shrink(config, packed, rows, in_features, a, rank, shrunk)
            _turn(shrunk, rows, depth, scale, corner, left)
            _expand(config, zeros, left, depth, start, rows, part, panel)
    release_tiles()


@njit(inline="always")
def _configure(config, first_rows, second_rows):
    """Set the rows of the two left tiles and of their sums; right tiles are full."""
    words = int64_array(config, 8)
    words[0] = 1  # palette
    words[2] = words[3] = 64 | 64 << 16 | 64 << 32 | 64 << 48  # bytes a row
    words[6] = first_rows * 0x01_0000_0101 | second_rows * 0x0100_0101_0000 | 16 << 48 | 16 << 56
    configure_tiles(config)


@njit(inline="always")
def _pack_x(x, x_stride, rows, in_features, packed):
    """Pack x into tiles of 32 inputs x 16 rows, with the tiles of all rows for the same inputs adjacent."""
    num_blocks = (rows + 15) // 16
    for inputs in range(in_features // 32):
        for block in range(num_blocks):
            first = 16 * block
            source = x + first * x_stride + 64 * inputs
            transpose_tile(source, x_stride, rows - 1 - first, packed + 1024 * (inputs * num_blocks + block))


@njit(inline="always")
def _shrink(config, packed, rows, in_features, a, rank, shrunk):
    """Compute A x^T as (rank, 32) float32."""
    a_stride = in_features * 2
    num_blocks = (rows + 15) // 16
    for first in range(0, rank, 32):
        height = min(rank - first, 32)
        num_left = (height + 15) // 16
        _configure(config, min(height, 16), max(height - 16, 1))
        zero_sums()
        for inputs in range(in_features // 32):
            left = a + first * a_stride + 64 * inputs
            accumulate(num_left, num_blocks, left, a_stride, packed + 1024 * num_blocks * inputs)
        store_sums(shrunk + first * 128, 128)
    for row in range(rank, (rank + 31) // 32 * 32):
        zero_line(shrunk + 128 * row)
        zero_line(shrunk + 128 * row + 64)


@njit(inline="always")
def _turn(shrunk, rows, depth, scale, corner, left):
    """Transpose the shrunk values to (32, depth) bfloat16, row by row, scaled."""
    for first_row in range(0, rows, 16):
        for first in range(0, depth, 16):
            transpose_tile(shrunk + first * 128 + first_row * 4, 128, 15, corner)
            for row in range(16):
                target = left + ((first_row + row) * depth + first) * 2
                scale_and_round_16(corner + 64 * row, scale, target)


@njit(inline="always")
def _expand(config, zeros, left, depth, start, rows, part, panel):
    """Compute y from the shrunk values, for rows from `start` on."""
    b, rank, y_stride, out_features = part[1], part[2], part[5], part[6]
    y, b_stride = part[4] + start * y_stride, out_features * 2
    sums = panel + depth * _PANEL * 2
    num_left = (rows + 15) // 16
    _configure(config, 16, 16)
    for first in range(0, out_features, _PANEL):
        width = min(out_features - first, _PANEL)
        _pack_panel(zeros, b + 2 * first, b_stride, depth, rank, width, panel)
        for column in range(0, width, 32):
            zero_sums()
            for block in range(depth // 32):
                right = panel + 1024 * (block * (_PANEL // 16) + column // 16)
                accumulate(num_left, 2, left + 64 * block, depth * 2, right)
            store_sums(sums, 128)
            for row in range(rows):
                target = y + row * y_stride + 2 * (first + column)
                scale_and_round_32(sums + 128 * row, np.float32(1.0), target)


@njit(inline="always")
def _pack_panel(zeros, b, b_stride, depth, rank, width, panel):
    """Pack B into tiles of 32 ranks x 16 columns, with tiles of the same ranks adjacent; zero past the last
    rank."""
    for pair in range(depth // 2):
        even = b + 2 * pair * b_stride
        odd = even + b_stride
        target = panel + 1024 * (pair // 16 * (_PANEL // 16)) + 64 * (pair % 16)
        for column in range(0, width, 32):
            if 2 * pair + 1 < rank:
                interleave(even + 2 * column, odd + 2 * column, target + 64 * column)
            elif 2 * pair < rank:
                interleave(even + 2 * column, zeros, target + 64 * column)
            else:
                zero_line(target + 64 * column)
                zero_line(target + 64 * column + 1024)
