"""Reads an adapter's weights from its file to where they belong in its slab.

Matrices that the slab holds as the file does are read straight into it; others pass through a piece of memory
small enough for a core's cache. Read, not mapped: a mapped file that is cut short meanwhile would kill the
process. A thread reads many matrices in one compiled call, those that are not converted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from io import FileIO
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loraplex.adapters.fingerprint import weights_unchanged
from loraplex.adapters.slab import SlabLayout
from loraplex.adapters.spec import AdapterSpec
from loraplex.adapters.tensors import WeightsHeader, read_header
from loraplex.core.errors import AdapterFormatError
from loraplex.kernels.cpu.file_matrices import FileMatrix, compile_reader, read_matrices
from loraplex.model.sharding import CUT_BY_INPUT, WHOLE, Shard

_SOURCE_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HELPERS: Final = 12
_PIECE_BYTES: Final = 256 << 10
_PART_BYTES: Final = 2 << 20
"""What one helper reads before it looks for more."""


class _Matrix(NamedTuple):
    """Rows of a matrix in the file, a part of their columns, and at which element of the slab they go: row
    by row, or column by column if `transposed`."""

    begin: int
    num_rows: int
    num_columns: int
    columns: slice
    start: int
    transposed: bool
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.num_columns * self.dtype.itemsize

    def unconverted(self, slab_address: int) -> FileMatrix:
        """To be read as it is, to a slab of the same type."""
        size = self.dtype.itemsize
        return FileMatrix(
            self.begin,
            self.num_rows,
            self.num_columns,
            self.columns.start,
            self.columns.stop,
            slab_address + self.start * size,
            self.transposed,
            size,
        )

    def read(self, fd: int, slab: torch.Tensor) -> None:
        """A few rows at a time, whatever the slab's type."""
        width = self.columns.stop - self.columns.start
        placed = slab[self.start : self.start + self.num_rows * width]
        target = placed.view(width, -1).t() if self.transposed else placed.view(-1, width)
        num_rows = max(_PIECE_BYTES // self.row_bytes, 1)
        piece = torch.empty(min(num_rows, self.num_rows), self.num_columns, dtype=self.dtype)
        for row in range(0, self.num_rows, num_rows):
            source = piece[: self.num_rows - row]
            _read_into(fd, _bytes_of(source), self.begin + row * self.row_bytes)
            target[row : row + source.shape[0]] = source[:, self.columns]


def read_slab(
    spec: AdapterSpec,
    layout: SlabLayout,
    slab: torch.Tensor,
    shard: Shard = WHOLE,
    helpers: Executor | None = None,
) -> None:
    """Read a version's weights, or a shard of them, into a slab. `layout` is the shard's; `helpers`: threads
    that read parts of it at the same time.

    The files must still be the ones that were hashed: a changed fingerprint is an error, since the
    weights would not be those of this version.
    """
    with FileIO(spec.weights_path) as file:
        _check_unchanged(spec, file)
        header = read_header(spec.weights_path, file)
        reads: list[Future[None]] = []
        try:
            for part in _parts(_matrices(layout, header, shard)):
                if helpers is None:
                    _read_part(file.fileno(), part, slab)
                else:
                    reads.append(helpers.submit(_read_part, file.fileno(), part, slab))
        finally:
            # All of them: none may go on reading a file that is closed, or into memory given away.
            wait(reads)
        for read in reads:
            read.result()
        _check_unchanged(spec, file)


class SlabReaders:
    """`read_slab` with the help of a few threads: one core alone copies no faster than a good disk reads."""

    def __init__(self, shard: Shard = WHOLE) -> None:
        self._shard = shard
        self._threads = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_HELPERS), "adapter-reader")
        self._threads.submit(compile_reader)  # before the first read, which would wait for it

    def __call__(self, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        read_slab(spec, layout, slab, self._shard, self._threads)

    def close(self) -> None:
        """After the last read."""
        self._threads.shutdown()


def _matrices(layout: SlabLayout, header: WeightsHeader, shard: Shard) -> Iterator[_Matrix]:
    """In the order in which they lie in the slab, layer by layer."""
    for slot in (slot for groups in layout.layers for slots in groups.values() for slot in slots):
        rank, by_input = slot.lora.rank, slot.lora.module in CUT_BY_INPUT
        a_info, b_info = header.tensors[slot.lora.a_name], header.tensors[slot.lora.b_name]
        a_columns = shard.part(a_info.shape[1]) if by_input else slice(0, a_info.shape[1])
        b_rows = slice(0, b_info.shape[0]) if by_input else shard.part(b_info.shape[0])
        for info, rows, columns, start in (
            (a_info, slice(0, rank), a_columns, slot.a_start),
            (b_info, b_rows, slice(0, rank), slot.b_start),
        ):
            dtype, num_columns = _SOURCE_DTYPES[info.dtype], info.shape[1]
            begin = header.data_start + info.begin + rows.start * num_columns * dtype.itemsize
            num_rows = rows.stop - rows.start
            yield _Matrix(begin, num_rows, num_columns, columns, start, info is b_info, dtype)


def _parts(matrices: Iterable[_Matrix]) -> Iterator[list[_Matrix]]:
    """Cut into runs of about the same size."""
    part: list[_Matrix] = []
    num_bytes = 0
    for matrix in matrices:
        part.append(matrix)
        num_bytes += matrix.num_rows * matrix.row_bytes
        if num_bytes >= _PART_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def _read_part(fd: int, part: Sequence[_Matrix], slab: torch.Tensor) -> None:
    address = slab.data_ptr()
    plain = [matrix for matrix in part if matrix.dtype == slab.dtype]
    scratch = _scratch(max((matrix.row_bytes for matrix in plain), default=0))
    num_read = read_matrices(fd, [matrix.unconverted(address) for matrix in plain], scratch)
    if num_read < len(plain):
        plain[num_read].read(fd, slab)  # says why
        _read_part(fd, plain[num_read + 1 :], slab)
    for matrix in part:
        if matrix.dtype != slab.dtype:
            matrix.read(fd, slab)


def _scratch(num_bytes: int) -> npt.NDArray[np.uint8]:
    """This thread's: memory that is new has to be got from the system first."""
    found: npt.NDArray[np.uint8] | None = getattr(_own, "scratch", None)
    if found is None or found.nbytes < num_bytes:
        found = _own.scratch = np.empty(max(num_bytes, _PIECE_BYTES), dtype=np.uint8)
    return found


_own = threading.local()


def _check_unchanged(spec: AdapterSpec, file: FileIO) -> None:
    if not weights_unchanged(spec, os.fstat(file.fileno())):
        raise AdapterFormatError(
            "its files changed on disk after it was registered; load it again under its name"
        )


def _read_into(fd: int, target: npt.NDArray[np.uint8], offset: int) -> None:
    view = memoryview(target)  # type: ignore[arg-type]
    while len(view) > 0:
        num_bytes = os.preadv(fd, [view], offset)
        if num_bytes == 0:
            raise AdapterFormatError("its weights file ends too early; it was changed while being read")
        view, offset = view[num_bytes:], offset + num_bytes


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return found
