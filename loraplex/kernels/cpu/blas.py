"""Torch's own matrix product, callable from inside a compiled kernel.

Many small products in a row are slow through torch: each wakes and joins the thread team for a few
microseconds of work. Inside a parallel region every thread can run products of its own instead, without joins
between them. torch's library exports the BLAS routine it was linked with; inside a region that routine stays
on the calling thread.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_NUM_ARGUMENTS = 13


@lru_cache(maxsize=1)
def sgemm_address() -> int | None:
    """Return the address of `sgemm_`; None where torch does not export it."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(library)).sgemm_, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


@intrinsic
def _call_with_pointers(typingctx, function, arguments):
    """Call a C function of 13 pointers, given its address and theirs."""

    def codegen(context, builder, signature, args):
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer] * _NUM_ARGUMENTS)
        addresses = [builder.extract_value(args[1], index) for index in range(_NUM_ARGUMENTS)]
        builder.call(
            builder.inttoptr(args[0], kind.as_pointer()),
            [builder.inttoptr(address, pointer) for address in addresses],
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, _NUM_ARGUMENTS)), codegen


@njit(error_model="numpy")
def sgemm(routine, transpose_a, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """Compute c = alpha * op(a) b + beta * c in column-major order; matrices are addresses of float32."""
    letters = np.array([84 if transpose_a else 78, 78], dtype=np.uint8)  # "T" or "N"
    sizes = np.array([m, n, k, lda, ldb, ldc], dtype=np.int32)
    factors = np.array([alpha, beta], dtype=np.float32)
    letter, size, factor = letters.ctypes.data, sizes.ctypes.data, factors.ctypes.data
    _call_with_pointers(
        routine,
        (
            letter,
            letter + 1,
            size,
            size + 4,
            size + 8,
            factor,
            a,
            size + 12,
            b,
            size + 16,
            factor + 4,
            c,
            size + 20,
        ),
    )
    # The arrays must outlive the call that uses their addresses.
    return letters[0] + sizes[0] + factors[0]
