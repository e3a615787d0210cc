"""Reads an adapter's weights from its file to where they belong in its slab.

Matrices that the slab holds as the file does are read straight into it; others pass through a piece of memory
small enough for a core's cache. Read, not mapped: a mapped file that is cut short meanwhile would kill the
process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import FileIO
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from loraplex.adapters.fingerprint import weights_unchanged
from loraplex.adapters.slab import SlabLayout
from loraplex.adapters.spec import AdapterSpec
from loraplex.adapters.tensors import TensorInfo, WeightsHeader, read_header
from loraplex.core.errors import AdapterFormatError
from loraplex.model.sharding import CUT_BY_INPUT, WHOLE, Shard

_SOURCE_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HELPERS: Final = 8
_PIECE_BYTES: Final = 256 << 10
_PART_BYTES: Final = 4 << 20
"""What one helper reads before it looks for more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    """Rows of a matrix in the file, a part of their columns, and the place of that in the slab.

    `target` is (rows, columns), or (columns, rows) if it is `transposed`.
    """

    begin: int
    num_rows: int
    num_columns: int
    dtype: torch.dtype
    columns: slice
    target: torch.Tensor
    transposed: bool

    @property
    def row_bytes(self) -> int:
        return self.num_columns * self.dtype.itemsize

    @property
    def is_as_in_file(self) -> bool:
        whole = self.columns.stop - self.columns.start == self.num_columns
        return whole and not self.transposed and self.target.dtype == self.dtype

    def read(self, fd: int) -> None:
        if self.is_as_in_file:
            _read_into(fd, _bytes_of(self.target), self.begin)
            return
        num_rows = max(_PIECE_BYTES // self.row_bytes, 1)
        piece = torch.empty(min(num_rows, self.num_rows), self.num_columns, dtype=self.dtype)
        for row in range(0, self.num_rows, num_rows):
            source = piece[: self.num_rows - row]
            _read_into(fd, _bytes_of(source), self.begin + row * self.row_bytes)
            rows = slice(row, row + source.shape[0])
            if self.transposed:
                _fill(self.target[:, rows], source[:, self.columns].t())
            else:
                _fill(self.target[rows], source[:, self.columns])


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
        parts = _parts(list(_matrices(layout, header, slab, shard)))
        if helpers is None:
            for part in parts:
                _read_part(file.fileno(), part)
        else:
            reads = [helpers.submit(_read_part, file.fileno(), part) for part in parts]
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

    def __call__(self, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        read_slab(spec, layout, slab, self._shard, self._threads)

    def close(self) -> None:
        """After the last read."""
        self._threads.shutdown()


def _matrices(
    layout: SlabLayout, header: WeightsHeader, slab: torch.Tensor, shard: Shard
) -> Iterator[_Matrix]:
    """In the order in which they lie in the slab, layer by layer."""
    for slot in (slot for groups in layout.layers for slots in groups.values() for slot in slots):
        rank, by_input = slot.lora.rank, slot.lora.module in CUT_BY_INPUT
        a_info, b_info = header.tensors[slot.lora.a_name], header.tensors[slot.lora.b_name]
        a_columns = shard.part(a_info.shape[1]) if by_input else slice(0, a_info.shape[1])
        a_RI = slab[slot.a_start : slot.a_start + rank * slot.in_features].view(rank, slot.in_features)
        yield _matrix(a_info, header, slice(0, rank), a_columns, a_RI, transposed=False)
        b_rows = slice(0, b_info.shape[0]) if by_input else shard.part(b_info.shape[0])
        b_RO = slab[slot.b_start : slot.b_start + rank * slot.out_features].view(rank, slot.out_features)
        yield _matrix(b_info, header, b_rows, slice(0, rank), b_RO, transposed=True)


def _matrix(
    info: TensorInfo,
    header: WeightsHeader,
    rows: slice,
    columns: slice,
    target: torch.Tensor,
    *,
    transposed: bool,
) -> _Matrix:
    dtype = _SOURCE_DTYPES[info.dtype]
    num_columns = info.shape[1]
    return _Matrix(
        begin=header.data_start + info.begin + rows.start * num_columns * dtype.itemsize,
        num_rows=rows.stop - rows.start,
        num_columns=num_columns,
        dtype=dtype,
        columns=columns,
        target=target,
        transposed=transposed,
    )


def _parts(matrices: Sequence[_Matrix]) -> list[list[_Matrix]]:
    """Cut into runs of about the same size."""
    parts: list[list[_Matrix]] = [[]]
    num_bytes = 0
    for matrix in matrices:
        if num_bytes >= _PART_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(matrix)
        num_bytes += matrix.num_rows * matrix.row_bytes
    return parts


def _read_part(fd: int, part: Sequence[_Matrix]) -> None:
    for matrix in part:
        matrix.read(fd)


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


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """target = source, converted. By numpy where it can: its copy stays on this thread, while torch's
    would wake the thread team that the running step is using."""
    if target.dtype != source.dtype:
        target.copy_(source)
        return
    words = torch.int16 if target.dtype.itemsize == 2 else torch.int32
    np.copyto(target.view(words).numpy(), source.view(words).numpy())
