"""Inner loops shared by the kernels, over float32 arrays given by address."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import numpy as np
from numba import njit

from loraplex.kernels.cpu.intrinsics import float32_array

FLOAT_BYTES = 4


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def dot(x, y, size):
    total = np.float32(0.0)
    for i in range(size):
        total += x[i] * y[i]
    return total


@njit(error_model="numpy")
def copy(source, target, size):
    for i in range(size):
        target[i] = source[i]


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def scale(x, size, factor):
    for i in range(size):
        x[i] *= factor


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def add_rows(out, size, weights, num_rows, rows):
    """Add the sum of weights[j] * row j to out, for contiguous rows of `size` floats.

    Works on four rows at a time, so that `out` is loaded and stored once for four of them.
    """
    row_bytes = size * FLOAT_BYTES
    whole = num_rows - num_rows % 4
    for j in range(0, whole, 4):
        address = rows + j * row_bytes
        r0 = float32_array(address, size)
        r1 = float32_array(address + row_bytes, size)
        r2 = float32_array(address + 2 * row_bytes, size)
        r3 = float32_array(address + 3 * row_bytes, size)
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for i in range(size):
            out[i] += w0 * r0[i] + w1 * r1[i] + w2 * r2[i] + w3 * r3[i]
    for j in range(whole, num_rows):
        row = float32_array(rows + j * row_bytes, size)
        weight = weights[j]
        for i in range(size):
            out[i] += weight * row[i]
