"""Machine-level operations that numba lacks: raw pointers, atomics, a bit cast."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic


def _pointer_to(pointed, element):
    """Return an intrinsic that converts an integer address to a pointer, given its type in LLVM and in
    numba."""

    @intrinsic
    def pointer(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], pointed.as_pointer())

        return types.CPointer(element)(types.int64), codegen

    return pointer


_float32_pointer = _pointer_to(ir.FloatType(), types.float32)
_int64_pointer = _pointer_to(ir.IntType(64), types.int64)
_int32_pointer = _pointer_to(ir.IntType(32), types.int32)
_int16_pointer = _pointer_to(ir.IntType(16), types.int16)


@intrinsic
def _fetch_add(typingctx, pointer):
    """Atomically add one to an int64 in memory and return its old value."""

    def codegen(context, builder, signature, args):
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", args[0], one, "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


@intrinsic
def load_acquire(typingctx, address):
    """Load the int64 at an address with acquire order: writes before its store are visible afterwards."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8, typ=ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Store an int64 at an address with release order: a load of it sees all writes before this."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def relax(typingctx):
    """Hint to the core that it is in a spin loop."""

    def codegen(context, builder, signature, args):
        i32 = ir.IntType(32)
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            pause = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=pause), [])
        elif machine in ("aarch64", "arm64"):
            hint = ir.FunctionType(ir.VoidType(), [i32])
            to_yield = ir.Constant(i32, 1)
            builder.call(builder.module.declare_intrinsic("llvm.aarch64.hint", fnty=hint), [to_yield])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def bits_as_float32(typingctx, bits):
    """Return the float32 with the given int32 bit pattern."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _prefetch_line(typingctx, address):
    """Prefetch the cache line at an integer address; never faults, whatever the address."""

    def codegen(context, builder, signature, args):
        pointer = ir.IntType(8).as_pointer()
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        read, keep, data = (ir.Constant(i32, value) for value in (0, 2, 1))
        builder.call(prefetch, [builder.inttoptr(args[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(inline="always")
def prefetch(address, num_bytes):
    for offset in range(0, num_bytes, 64):
        _prefetch_line(address + offset)


@njit(inline="always")
def float32_array(address, length):
    return carray(_float32_pointer(address), length, np.float32)


@njit(inline="always")
def int64_array(address, length):
    return carray(_int64_pointer(address), length, np.int64)


@njit(inline="always")
def int32_array(address, length):
    return carray(_int32_pointer(address), length, np.int32)


@njit(inline="always")
def int16_array(address, length):
    return carray(_int16_pointer(address), length, np.int16)


@njit(inline="always")
def uint64_at(address):
    return carray(_int64_pointer(address), 1, np.int64).view(np.uint64)


@njit(inline="always")
def claim(block):
    """Return the next work item of a parallel region. `block` is the kernel's argument block."""
    return _fetch_add(block)


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


@njit(inline="always", fastmath={"contract", "reassoc", "nsz"})
def fast_exp(x):
    """Return exp(x) in float32 to 2e-7 relative, in plain arithmetic so that loops over it vectorise.

    Uses range reduction to |r| <= ln2/2, a degree-6 polynomial, and the power of two by the exponent bits.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * bits_as_float32(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
