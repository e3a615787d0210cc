"""Row-wise kernels: norm, residual add, rotary embedding with the cache write, gated activation.

Work items are runs of rows, so that claiming one is cheap relative to its work.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import numpy as np
from numba import carray, njit

from loraplex.kernels.cpu import team
from loraplex.kernels.cpu.intrinsics import claim, fast_exp, float32_array, int64_array
from loraplex.kernels.cpu.vectors import FLOAT_BYTES, copy, dot

_ROWS_PER_ITEM = 4


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def _norm_row(x, out, weight, size, eps):
    factor = np.float32(1.0) / np.sqrt(dot(x, x, size) / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def _add_row(x, residual, size):
    for i in range(size):
        residual[i] += x[i]


def _rms_norm(block):
    args = carray(block, 8)
    x, residual, out, num_rows, size = args[1], args[2], args[3], args[4], args[5]
    weight = float32_array(args[6], size)
    eps = float32_array(args[7], 1)[0]
    row_bytes = size * FLOAT_BYTES
    while True:
        first = claim(block) * _ROWS_PER_ITEM
        if first >= num_rows:
            return
        for row in range(first, min(first + _ROWS_PER_ITEM, num_rows)):
            source = float32_array(x + row * row_bytes, size)
            if residual != 0:
                summed = float32_array(residual + row * row_bytes, size)
                _add_row(source, summed, size)
                _norm_row(summed, float32_array(out + row * row_bytes, size), weight, size, eps)
            else:
                _norm_row(source, float32_array(out + row * row_bytes, size), weight, size, eps)


RMS_NORM = team.kernel(_rms_norm)
"""Arguments: x, residual (0 for none), out, rows, row size, weight, address of the float32 epsilon."""


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def _rotate(first, second, cos, sin, half):
    for i in range(half):
        a, b = first[i], second[i]
        first[i] = a * cos[i] - b * sin[i]
        second[i] = b * cos[i] + a * sin[i]


def _rope_and_cache(block):
    args = carray(block, 12)
    qkv, num_rows, stride, cos_sin = args[1], args[2], args[3], args[4]
    positions, slots = int64_array(args[5], num_rows), int64_array(args[6], num_rows)
    k_cache, v_cache = args[7], args[8]
    num_kv_heads, block_size, head_dim = args[9], args[10], args[11]
    half, head_bytes = head_dim // 2, head_dim * FLOAT_BYTES
    num_rotated = stride // head_dim - num_kv_heads
    while True:
        row = claim(block)
        if row >= num_rows:
            return
        cos = float32_array(cos_sin + positions[row] * head_bytes, half)
        sin = float32_array(cos_sin + positions[row] * head_bytes + half * FLOAT_BYTES, half)
        base = qkv + row * stride * FLOAT_BYTES
        for head in range(num_rotated):
            start = base + head * head_bytes
            _rotate(
                float32_array(start, half), float32_array(start + half * FLOAT_BYTES, half), cos, sin, half
            )
        cache_block, offset = slots[row] // block_size, slots[row] % block_size
        for head in range(num_kv_heads):
            target = ((cache_block * num_kv_heads + head) * block_size + offset) * head_bytes
            key = base + (num_rotated - num_kv_heads + head) * head_bytes
            value = base + (num_rotated + head) * head_bytes
            copy(float32_array(key, head_dim), float32_array(k_cache + target, head_dim), head_dim)
            copy(float32_array(value, head_dim), float32_array(v_cache + target, head_dim), head_dim)


ROPE_AND_CACHE = team.kernel(_rope_and_cache)
"""Arguments: qkv, rows, row stride, cos_sin table, positions, slots, k cache, v cache, KV heads,
block size, head size."""


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def _silu_mul_row(gate, up, out, size):
    for i in range(size):
        out[i] = gate[i] / (np.float32(1.0) + fast_exp(-gate[i])) * up[i]


def _silu_mul(block):
    args = carray(block, 5)
    gate_up, out, num_rows, size = args[1], args[2], args[3], args[4]
    while True:
        first = claim(block) * _ROWS_PER_ITEM
        if first >= num_rows:
            return
        for row in range(first, min(first + _ROWS_PER_ITEM, num_rows)):
            gate = gate_up + row * 2 * size * FLOAT_BYTES
            _silu_mul_row(
                float32_array(gate, size),
                float32_array(gate + size * FLOAT_BYTES, size),
                float32_array(out + row * size * FLOAT_BYTES, size),
                size,
            )


SILU_MUL = team.kernel(_silu_mul)
"""Arguments: stacked (gate, up), out, rows, size of one of the two."""
