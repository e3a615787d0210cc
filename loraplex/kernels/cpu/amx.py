"""Matrix tiles of x86 cores (AMX), and the vector operations around them.

A tile is 16 rows of 64 bytes. One instruction multiplies a tile of 16 x 32 bfloat16 by one of 32 x 16, whose
rows hold pairs: row k has elements 2k and 2k + 1 of every column side by side. Sums are float32, 16 x 16 a
tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import ctypes
import platform
import sys
from functools import lru_cache

import numba
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

TILE_BYTES = 1024
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

_LEFT = 4
_RIGHT = (6, 7)
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_VOID = ir.VoidType()
_BYTES = _I8.as_pointer()


@lru_cache(maxsize=1)
def has_amx() -> bool:
    """Whether this process may use bfloat16 tiles; asks the kernel for leave."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    # Compiled for another machine than this one, tiles would not compile at all.
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return False
    features = binding.get_host_cpu_features()
    if not (features.get("amx-bf16") and features.get("avx512bw")):
        return False
    request = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return ctypes.CDLL(None).syscall(*(ctypes.c_long(value) for value in request)) == 0


def _instruction(builder, name, arguments):
    kind = ir.FunctionType(_VOID, [argument.type for argument in arguments])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", fnty=kind), arguments)


def _tile(number):
    return ir.Constant(_I8, number)


def _pointer(builder, address, element=_I8):
    return builder.inttoptr(address, element.as_pointer())


@intrinsic
def configure_tiles(typingctx, address):
    """Take the tiles' shapes from the 64 bytes at an address; all tiles are zero then."""

    def codegen(context, builder, signature, args):
        _instruction(builder, "ldtilecfg", [_pointer(builder, args[0])])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release_tiles(typingctx):
    """Back to no tiles at all: the state to save when this thread is interrupted is small again."""

    def codegen(context, builder, signature, args):
        _instruction(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def zero_sums(typingctx):
    """Both tiles of sums."""

    def codegen(context, builder, signature, args):
        for number in (0, 1):
            _instruction(builder, "tilezero", [_tile(number)])
        return context.get_dummy_value()

    return types.void(), codegen


def _accumulate(num_right):
    @intrinsic
    def accumulate(typingctx, left, left_stride, right):
        """sums[i] += left @ right[i], with the right tiles one after the other in memory."""

        def codegen(context, builder, signature, args):
            left, left_stride, right = args
            _instruction(builder, "tileloadd64", [_tile(_LEFT), _pointer(builder, left), left_stride])
            for index in range(num_right):
                address = builder.add(right, ir.Constant(_I64, index * TILE_BYTES))
                loaded = [_tile(_RIGHT[index]), _pointer(builder, address), ir.Constant(_I64, 64)]
                _instruction(builder, "tileloadd64", loaded)
                _instruction(builder, "tdpbf16ps", [_tile(index), _tile(_LEFT), _tile(_RIGHT[index])])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return accumulate


accumulate_one = _accumulate(1)
accumulate_two = _accumulate(2)


@intrinsic
def store_sums(typingctx, address, stride):
    """Both tiles of sums side by side, as float32."""

    def codegen(context, builder, signature, args):
        for number in (0, 1):
            to = builder.add(args[0], ir.Constant(_I64, 64 * number))
            _instruction(builder, "tilestored64", [_tile(number), _pointer(builder, to), args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def transpose_tile(typingctx, source, stride, last_row, target):
    """target[j][i] = source[i][j] for 16 x 16 words of 32 bits; rows past `last_row` repeat that."""

    def codegen(context, builder, signature, args):
        source, stride, last_row, target = args
        vector = ir.VectorType(_I32, 16)
        rows = []
        for index in range(16):
            row = ir.Constant(_I64, index)
            row = builder.select(builder.icmp_signed("<", row, last_row), row, last_row)
            address = builder.add(source, builder.mul(row, stride))
            rows.append(builder.load(_pointer(builder, address, vector), align=1))
        for step in (1, 2, 4, 8):
            rows = _exchange(builder, rows, step)
        for index, row in enumerate(rows):
            address = builder.add(target, ir.Constant(_I64, 64 * index))
            builder.store(row, _pointer(builder, address, vector), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


def _exchange(builder, rows, step):
    """Swap the blocks of `step` x `step` words beside the diagonal of every block twice that size."""
    lows = [j if not j & step else 16 + j - step for j in range(16)]
    highs = [j + step if not j & step else 16 + j for j in range(16)]
    result = list(rows)
    for index in (index for index in range(16) if not index & step):
        pair = rows[index], rows[index + step]
        for to, mask in ((index, lows), (index + step, highs)):
            result[to] = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_I32, 16), mask))
    return result


@intrinsic
def interleave(typingctx, even, odd, target):
    """16 elements of 16 bits from each of two addresses, in turn."""

    def codegen(context, builder, signature, args):
        narrow, wide = ir.VectorType(_I16, 16), ir.VectorType(_I32, 16)
        low, high = (
            builder.zext(builder.load(_pointer(builder, address, narrow), align=1), wide)
            for address in args[:2]
        )
        pairs = builder.or_(low, builder.shl(high, ir.Constant(wide, [16] * 16)))
        builder.store(pairs, _pointer(builder, args[2], wide), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def scale_and_round(typingctx, source, scale, target):
    """16 float32 times a factor, as bfloat16, to nearest and even."""

    def codegen(context, builder, signature, args):
        wide, narrow = ir.VectorType(_I32, 16), ir.VectorType(_I16, 16)
        floats = ir.VectorType(ir.FloatType(), 16)
        factor = builder.insert_element(ir.Constant(floats, ir.Undefined), args[1], ir.Constant(_I32, 0))
        factor = builder.shuffle_vector(factor, factor, ir.Constant(wide, [0] * 16))
        scaled = builder.fmul(builder.load(_pointer(builder, args[0], floats), align=1), factor)
        bits = builder.bitcast(scaled, wide)
        sixteen, half = (ir.Constant(wide, [value] * 16) for value in (16, 0x7FFF))
        is_odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(wide, [1] * 16))
        rounded = builder.lshr(builder.add(builder.add(bits, half), is_odd), sixteen)
        builder.store(builder.trunc(rounded, narrow), _pointer(builder, args[2], narrow), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


@intrinsic
def zero_line(typingctx, address):
    """64 bytes."""

    def codegen(context, builder, signature, args):
        wide = ir.VectorType(_I32, 16)
        builder.store(ir.Constant(wide, [0] * 16), _pointer(builder, args[0], wide), align=1)
        return context.get_dummy_value()

    return types.void(types.int64), codegen
