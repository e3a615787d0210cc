"""The LoRA product of a few rows in bfloat16 on one core, by matrix tiles.

It reads the weights as they lie and is compiled once for all sizes. Rows go through in blocks of 32: x is
laid out for the tiles once for all modules that share it; A goes into the tiles from where it is; of B a
panel of a few columns at a time is interleaved, multiplied and written out.
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
    accumulate_one,
    accumulate_two,
    configure_tiles,
    has_amx,
    interleave,
    release_tiles,
    scale_and_round,
    store_sums,
    transpose_tile,
    zero_line,
    zero_sums,
)
from loraplex.kernels.cpu.intrinsics import bits_as_float32, int64_array, prefetch

PART_WORDS = 7
"""A's address, B_t's address, rank, bits of the float32 scale, y's address, y's bytes a row, out_features."""
_HEAD_WORDS = 7
_BLOCK_ROWS = 32
_PANEL = 128
_LINE = 64


def amx_lora() -> Callable[..., None] | None:
    """The kernel, or None on a machine without such tiles. See `multiply` for the block it is called with."""
    if not has_amx():
        return None
    return _compiled()


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(team.kernel(multiply))


def takes(in_features: int, out_features: int) -> bool:
    """Whether the sizes fill tiles; any rank does."""
    return in_features % 32 == 0 and out_features % 16 == 0


def scratch_bytes(in_features: int, max_rank: int) -> int:
    """Memory that a call needs for itself, which need not be kept between calls."""
    depth = -(-max_rank // 32) * 32
    return (
        4 * _LINE
        + _BLOCK_ROWS * in_features * 2
        + depth * _BLOCK_ROWS * 4
        + 16 * _LINE
        + depth * _BLOCK_ROWS * 2
        + depth * _PANEL * 2
        + _BLOCK_ROWS * _PANEL * 4
    )


def multiply(block):
    """y = scale * (x A^T) B_t for every part.

    The block: x's address, its bytes a row, number of rows, in_features, number of parts, scratch memory, one
    word unused, then the parts.
    """
    head = carray(block, _HEAD_WORDS)
    x, x_stride, num_rows, in_features, num_parts, scratch = (
        head[0],
        head[1],
        head[2],
        head[3],
        head[4],
        head[5],
    )
    parts = carray(block, _HEAD_WORDS + num_parts * PART_WORDS)[_HEAD_WORDS:]
    config, zeros = scratch, scratch + _LINE
    for line in range(4):
        zero_line(scratch + line * _LINE)
    packed = scratch + 4 * _LINE
    rest = packed + _BLOCK_ROWS * in_features * 2
    for start in range(0, num_rows, _BLOCK_ROWS):
        rows = min(num_rows - start, _BLOCK_ROWS)
        _pack_x(x + start * x_stride, x_stride, rows, in_features, packed)
        for index in range(num_parts):
            part = parts[index * PART_WORDS :]
            a, b, rank, out_features = part[0], part[1], part[2], part[6]
            scale = bits_as_float32(np.int32(part[3]))
            depth = (rank + 31) // 32 * 32
            shrunk = rest
            corner = shrunk + depth * _BLOCK_ROWS * 4
            left = corner + 16 * _LINE
            panel = left + depth * _BLOCK_ROWS * 2
            _shrink(config, packed, rows, in_features, a, rank, shrunk)
            _turn(shrunk, rows, depth, scale, corner, left)
            _expand(
                config,
                zeros,
                left,
                rows,
                depth,
                b,
                rank,
                out_features,
                part[4] + start * part[5],
                part[5],
                panel,
            )
    release_tiles()


@njit(inline="always")
def _configure(config, sum_rows, left_rows):
    """Rows of the two tiles of sums and of the one on the left; those on the right are full."""
    words = int64_array(config, 8)
    words[0] = 1  # palette
    words[2] = 64 | 64 << 16  # bytes a row, of tiles 0 and 1,
    words[3] = 64 | 64 << 32 | 64 << 48  # 4, 6 and 7
    words[6] = sum_rows | sum_rows << 8 | left_rows << 32 | 16 << 48 | 16 << 56
    configure_tiles(config)


@njit(inline="always")
def _pack_x(x, x_stride, rows, in_features, packed):
    """Tiles of 32 inputs x 16 rows, those of all rows for the same inputs side by side."""
    num_blocks = (rows + 15) // 16
    for inputs in range(in_features // 32):
        for block in range(num_blocks):
            first = 16 * block
            source = x + first * x_stride + 64 * inputs
            transpose_tile(source, x_stride, rows - 1 - first, packed + 1024 * (inputs * num_blocks + block))


@njit(inline="always")
def _shrink(config, packed, rows, in_features, a, rank, shrunk):
    """(rank, 32) float32: A x^T."""
    a_stride = in_features * 2
    for first in range(0, rank, 16):
        height = min(rank - first, 16)
        _configure(config, height, height)
        zero_sums()
        left = a + first * a_stride
        for inputs in range(in_features // 32):
            if rows > 16:
                accumulate_two(left + 64 * inputs, a_stride, packed + 2048 * inputs)
            else:
                accumulate_one(left + 64 * inputs, a_stride, packed + 1024 * inputs)
        store_sums(shrunk + first * 128, 128)
    for row in range(rank, (rank + 31) // 32 * 32):
        zero_line(shrunk + 128 * row)
        zero_line(shrunk + 128 * row + 64)


@njit(inline="always")
def _turn(shrunk, rows, depth, scale, corner, left):
    """(32, depth) bfloat16: what was shrunk, scaled, a row after the other."""
    for first_row in range(0, rows, 16):
        for first in range(0, depth, 16):
            transpose_tile(shrunk + first * 128 + first_row * 4, 128, 15, corner)
            for row in range(16):
                target = left + ((first_row + row) * depth + first) * 2
                scale_and_round(corner + 64 * row, scale, target)


@njit(inline="always")
def _expand(config, zeros, left, rows, depth, b, rank, out_features, y, y_stride, panel):
    b_stride = out_features * 2
    sums = panel + depth * _PANEL * 2
    _configure(config, 16, 16)
    for first in range(0, out_features, _PANEL):
        width = min(out_features - first, _PANEL)
        _pack_panel(zeros, b + 2 * first, b_stride, depth, rank, width, panel)
        if first + _PANEL < out_features:
            for row in range(rank):
                prefetch(b + row * b_stride + 2 * (first + _PANEL), 2 * _PANEL)
        for first_row in range(0, rows, 16):
            for column in range(0, width, 32):
                zero_sums()
                for block in range(depth // 32):
                    source = left + (first_row * depth + 32 * block) * 2
                    right = panel + 1024 * (block * (_PANEL // 16) + column // 16)
                    if column + 16 < width:
                        accumulate_two(source, depth * 2, right)
                    else:
                        accumulate_one(source, depth * 2, right)
                store_sums(sums + (first_row * _PANEL + column) * 4, _PANEL * 4)
        for row in range(rows):
            for column in range(0, width, 16):
                target = y + row * y_stride + 2 * (first + column)
                scale_and_round(sums + (row * _PANEL + column) * 4, np.float32(1.0), target)


@njit(inline="always")
def _pack_panel(zeros, b, b_stride, depth, rank, width, panel):
    """Tiles of 32 ranks x 16 columns, those of one rank side by side; zero past the last rank."""
    for pair in range(depth // 2):
        even = b + 2 * pair * b_stride
        odd = even + b_stride
        target = panel + 1024 * (pair // 16 * (_PANEL // 16)) + 64 * (pair % 16)
        for column in range(0, width, 16):
            if 2 * pair + 1 < rank:
                interleave(even + 2 * column, odd + 2 * column, target + 64 * column)
            elif 2 * pair < rank:
                interleave(even + 2 * column, zeros, target + 64 * column)
            else:
                zero_line(target + 64 * column)
