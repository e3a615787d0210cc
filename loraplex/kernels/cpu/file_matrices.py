"""Reads matrices from a file into their memory, many in one call, without the GIL.

A thread that returned to Python for every matrix would wait longer for the GIL than it reads.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types

from loraplex.kernels.cpu import team
from loraplex.kernels.cpu.intrinsics import int16_array, int32_array, uint64_at

_HEAD_WORDS: Final = 5
_MATRIX_WORDS: Final = 8
_BLOCK_ROWS: Final = 32
"""Rows that are transposed at a time: their columns fill cache lines."""

_compiling = threading.Lock()
_EVEN, _ODD = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFF0000FFFF0000)
_LOW, _HIGH = np.uint64(0x00000000FFFFFFFF), np.uint64(0xFFFFFFFF00000000)
_16, _32 = np.uint64(16), np.uint64(32)

_pread = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))


class FileMatrix(NamedTuple):
    """Rows of a matrix that begin at a byte of a file, columns [first_column, end_column) of them, and the
    address they are copied to, as they are or transposed."""

    begin: int
    num_rows: int
    num_columns: int
    first_column: int
    end_column: int
    target: int
    transposed: bool
    element_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.num_columns * self.element_bytes


def read_matrices(fd: int, matrices: Sequence[FileMatrix], scratch: npt.NDArray[np.uint8]) -> int:
    """Read the matrices in this order, and return how many were read: fewer if the file ended or could not be
    read. `scratch` must hold the longest of their rows."""
    assert all(matrix.element_bytes in (2, 4) for matrix in matrices)
    assert all(matrix.row_bytes <= scratch.nbytes for matrix in matrices)
    words = [0, fd, len(matrices), scratch.ctypes.data, scratch.nbytes]
    for matrix in matrices:
        words += matrix
    block = (ctypes.c_int64 * len(words))(*words)
    compile_reader()(block)
    return int(block[0])


def compile_reader() -> Callable[[Any], None]:
    """Return the compiled reader; compiles it on the first call, while concurrent callers wait."""
    with _compiling:
        return _compiled()


@lru_cache(maxsize=1)
def _compiled() -> Callable[[Any], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(team.kernel(_read_matrices))


def _read_matrices(block):
    """Read matrices. The block: number done, file, number of matrices, scratch memory and its size; then the
    fields of `FileMatrix` of each."""
    head = carray(block, _HEAD_WORDS)
    num_matrices = head[2]
    words = carray(block, _HEAD_WORDS + num_matrices * _MATRIX_WORDS)
    for number in range(num_matrices):
        first = _HEAD_WORDS + number * _MATRIX_WORDS
        if not _read_matrix(head[1], words, first, head[3], head[4]):
            return
        head[0] = number + 1


@njit
def _read_matrix(fd, words, first, scratch, scratch_bytes):
    """Read one matrix; words from `first` on are the fields of a `FileMatrix`. Return False on failure."""
    begin, num_rows, num_columns = words[first], words[first + 1], words[first + 2]
    left, width, target = words[first + 3], words[first + 4] - words[first + 3], words[first + 5]
    transposed, size = words[first + 6] != 0, words[first + 7]
    row_bytes = num_columns * size
    if not transposed and width == num_columns:
        return _read_all(fd, begin, target, num_rows * row_bytes)
    rows_at_once = scratch_bytes // row_bytes
    for row in range(0, num_rows, rows_at_once):
        count = min(rows_at_once, num_rows - row)
        if not _read_all(fd, begin + row * row_bytes, scratch, count * row_bytes):
            return False
        # Distances between the targets of a column's and of a row's next elements.
        down, right = (1, num_rows) if transposed else (width, 1)
        source, placed = scratch + left * size, target + row * down * size
        if size == 2 and transposed and row_bytes % 8 == 0 and width % 4 == 0 and (count | num_rows) % 4 == 0:
            _turn_fours(source, placed, count, row_bytes, width, num_rows * size)
        elif size == 2:
            _place(int16_array(source, 1), int16_array(placed, 1), count, num_columns, width, down, right)
        else:
            _place(int32_array(source, 1), int32_array(placed, 1), count, num_columns, width, down, right)
    return True


@njit
def _read_all(fd, begin, target, num_bytes):
    done = 0
    while done < num_bytes:
        got = _pread(np.int32(fd), target + done, num_bytes - done, begin + done)
        if got <= 0:
            return False
        done += got
    return True


@njit
def _place(source, placed, num_rows, num_columns, width, down, right):
    for top in range(0, num_rows, _BLOCK_ROWS):
        bottom = min(top + _BLOCK_ROWS, num_rows)
        for column in range(width):
            for row in range(top, bottom):
                placed[row * down + column * right] = source[row * num_columns + column]


@njit
def _turn_fours(source, placed, num_rows, row_bytes, width, turned_row_bytes):
    """Transpose elements of two bytes, four by four in eight loads and stores."""
    for top in range(0, num_rows, _BLOCK_ROWS):
        bottom = min(top + _BLOCK_ROWS, num_rows)
        for column in range(0, width, 4):
            for row in range(top, bottom, 4):
                start = source + row * row_bytes + column * 2
                a, b = uint64_at(start)[0], uint64_at(start + row_bytes)[0]
                c, d = uint64_at(start + 2 * row_bytes)[0], uint64_at(start + 3 * row_bytes)[0]
                # Pairs of two rows: the first and third elements, the second and fourth ones.
                ab_even, cd_even = (a & _EVEN) | ((b & _EVEN) << _16), (c & _EVEN) | ((d & _EVEN) << _16)
                ab_odd, cd_odd = ((a >> _16) & _EVEN) | (b & _ODD), ((c >> _16) & _EVEN) | (d & _ODD)
                end = placed + row * 2 + column * turned_row_bytes
                uint64_at(end)[0] = (ab_even & _LOW) | (cd_even << _32)
                uint64_at(end + turned_row_bytes)[0] = (ab_odd & _LOW) | (cd_odd << _32)
                uint64_at(end + 2 * turned_row_bytes)[0] = (ab_even >> _32) | (cd_even & _HIGH)
                uint64_at(end + 3 * turned_row_bytes)[0] = (ab_odd >> _32) | (cd_odd & _HIGH)
