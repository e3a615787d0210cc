"""Matrix tiles of x86 cores (AMX), and the vector operations around them.

A tile is 16 rows of 64 bytes. One instruction multiplies a tile of 16 x 32 bfloat16 by one of 32 x 16, whose
rows hold pairs: row k has elements 2k and 2k + 1 of every column adjacent. Sums are float32 tiles of 16 x 16.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type,misc"

from __future__ import annotations

import ctypes
import platform
import sys
from functools import lru_cache

import numba
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

TILE_BYTES = 1024
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

# Tiles 0 to 3 hold sums: products of the left tiles 4 and 5 with the right tiles 6 and 7.
_SUMS = ((0, 1), (2, 3))
_LEFT = (4, 5)
_RIGHT = (6, 7)
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_VOID = ir.VoidType()
_BYTES = _I8.as_pointer()


class _BFloat(ir.Type):
    """LLVM's bfloat16, which llvmlite has no name for."""

    def _to_string(self):
        return "bfloat"


@lru_cache(maxsize=1)
def has_amx() -> bool:
    """Return whether this process may use bfloat16 tiles; asks the kernel for permission."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    # With numba set to compile for another CPU, tile instructions would not compile.
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
    """Load the tiles' shapes from the 64 bytes at an address; this zeroes all tiles."""

    def codegen(context, builder, signature, args):
        _instruction(builder, "ldtilecfg", [_pointer(builder, args[0])])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release_tiles(typingctx):
    """Release the tiles: the state to save when this thread is interrupted is small again."""

    def codegen(context, builder, signature, args):
        _instruction(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def zero_sums(typingctx):
    """Zero all four tiles of sums."""

    def codegen(context, builder, signature, args):
        for number in (*_SUMS[0], *_SUMS[1]):
            _instruction(builder, "tilezero", [_tile(number)])
        return context.get_dummy_value()

    return types.void(), codegen


def _accumulate(num_left, num_right):
    @intrinsic
    def accumulate(typingctx, left, left_stride, right):
        """Compute sums[i][j] += left[i] @ right[j]. Left tiles are 16 rows apart, right ones are
        contiguous."""

        def codegen(context, builder, signature, args):
            left, left_stride, right = args
            sixteen = ir.Constant(_I64, 16)
            for tile in _LEFT[:num_left]:
                _instruction(builder, "tileloadd64", [_tile(tile), _pointer(builder, left), left_stride])
                left = builder.add(left, builder.mul(left_stride, sixteen))
            for j, tile in enumerate(_RIGHT[:num_right]):
                address = builder.add(right, ir.Constant(_I64, j * TILE_BYTES))
                loaded = [_tile(tile), _pointer(builder, address), ir.Constant(_I64, 64)]
                _instruction(builder, "tileloadd64", loaded)
                for i in range(num_left):
                    _instruction(builder, "tdpbf16ps", [_tile(_SUMS[i][j]), _tile(_LEFT[i]), _tile(tile)])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return accumulate


_accumulate_1_1 = _accumulate(1, 1)
_accumulate_1_2 = _accumulate(1, 2)
_accumulate_2_1 = _accumulate(2, 1)
_accumulate_2_2 = _accumulate(2, 2)


@njit(inline="always")
def accumulate(num_left, num_right, left, left_stride, right):
    """Compute sums[i][j] += left[i] @ right[j] for one or two of each."""
    if num_left > 1:
        if num_right > 1:
            _accumulate_2_2(left, left_stride, right)
        else:
            _accumulate_2_1(left, left_stride, right)
    elif num_right > 1:
        _accumulate_1_2(left, left_stride, right)
    else:
        _accumulate_1_1(left, left_stride, right)


@intrinsic
def store_sums(typingctx, address, stride):
    """Store all four tiles of sums as float32: those of one left tile adjacent, the others 16 rows below."""

    def codegen(context, builder, signature, args):
        address, stride = args
        for tiles in _SUMS:
            for j, tile in enumerate(tiles):
                to = builder.add(address, ir.Constant(_I64, 64 * j))
                _instruction(builder, "tilestored64", [_tile(tile), _pointer(builder, to), stride])
            address = builder.add(address, builder.mul(stride, ir.Constant(_I64, 16)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def transpose_tile(typingctx, source, stride, last_row, target):
    """Set target[j][i] = source[i][j] for 16 x 16 words of 32 bits; rows past `last_row` repeat that row."""

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
    """Swap the off-diagonal blocks of `step` x `step` words within every block twice that size."""
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
    """Interleave 32 elements of 16 bits from each of two addresses, into two tiles, 16 of each."""

    def codegen(context, builder, signature, args):
        row = ir.VectorType(_I16, 32)
        pair = [builder.load(_pointer(builder, address, row), align=1) for address in args[:2]]
        for half in (0, 1):
            mask = [16 * half + index // 2 + 32 * (index % 2) for index in range(32)]
            mixed = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_I32, 32), mask))
            address = builder.add(args[2], ir.Constant(_I64, half * TILE_BYTES))
            builder.store(mixed, _pointer(builder, address, row), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _scale_and_round(width):
    @intrinsic
    def scale_and_round(typingctx, source, scale, target):
        """Multiply float32 by a factor, and round to bfloat16, to nearest even."""

        def codegen(context, builder, signature, args):
            floats = ir.VectorType(ir.FloatType(), width)
            factor = builder.insert_element(ir.Constant(floats, ir.Undefined), args[1], ir.Constant(_I32, 0))
            factor = builder.shuffle_vector(
                factor, factor, ir.Constant(ir.VectorType(_I32, width), [0] * width)
            )
            scaled = builder.fmul(builder.load(_pointer(builder, args[0], floats), align=1), factor)
            rounded = builder.fptrunc(scaled, ir.VectorType(_BFloat(), width))
            builder.store(rounded, _pointer(builder, args[2], rounded.type), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64), codegen

    return scale_and_round


scale_and_round_16 = _scale_and_round(16)
scale_and_round_32 = _scale_and_round(32)


@intrinsic
def zero_line(typingctx, address):
    """Zero 64 bytes."""

    def codegen(context, builder, signature, args):
        wide = ir.VectorType(_I32, 16)
        builder.store(ir.Constant(wide, [0] * 16), _pointer(builder, args[0], wide), align=1)
        return context.get_dummy_value()

    return types.void(types.int64), codegen
