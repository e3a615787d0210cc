"""Reads an adapter's weights from its file into a slab.

Matrices that have the same layout in slab and file are read straight into the slab; others pass through a
buffer small enough for a core's cache. Files are read, not mapped: truncating a mapped file would kill the
process. A thread reads many matrices that need no conversion in one compiled call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from io import FileIO
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loraplex.adapters.fingerprint import join_fingerprints
from loraplex.adapters.open_file import open_regular
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.slab import SlabLayout
from loraplex.adapters.spec import CONFIG_FILE, AdapterSpec
from loraplex.adapters.tensors import FileCutShortError, TensorInfo, WeightsHeader, parse_header
from loraplex.core.errors import AdapterError, AdapterFormatError
from loraplex.core.shape import ModelShape
from loraplex.engine.helper_threads import HelperThreads
from loraplex.kernels.cpu.file_matrices import FileMatrix, compile_reader, read_matrices
from loraplex.model.sharding import CUT_BY_INPUT, WHOLE, Shard

_SOURCE_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHANGED: Final = (
    "its files changed on disk after it was registered; restore them, or load it again under its name"
)
_MAX_HELPERS: Final = 12
_PIECE_BYTES: Final = 256 << 10
_PART_BYTES: Final = 2 << 20
"""Bytes that a helper thread reads as one task."""
_MAX_IDLE: Final = 2
"""Sets of helper threads kept between reads: as many as there are reads at a time."""


class _Matrix(NamedTuple):
    """A matrix: its place in the file and in the slab, and the file's dtype."""

    place: FileMatrix
    dtype: torch.dtype

    def read(self, fd: int, slab: torch.Tensor) -> None:
        """Read a few rows at a time, converting them to the slab's dtype."""
        place, columns = self.place, slice(self.place.first_column, self.place.end_column)
        width, start = columns.stop - columns.start, (place.target - slab.data_ptr()) // slab.itemsize
        placed = slab[start : start + place.num_rows * width]
        target = placed.view(width, -1).t() if place.transposed else placed.view(-1, width)
        num_rows = max(_PIECE_BYTES // place.row_bytes, 1)
        piece = torch.empty(min(num_rows, place.num_rows), place.num_columns, dtype=self.dtype)
        for row in range(0, place.num_rows, num_rows):
            source = piece[: place.num_rows - row]
            _read_into(fd, _bytes_of(source), place.begin + row * place.row_bytes)
            target[row : row + source.shape[0]] = source[:, columns]


def read_slab(
    spec: AdapterSpec,
    layout: SlabLayout,
    slab: torch.Tensor,
    shard: Shard = WHOLE,
    helpers: Executor | None = None,
) -> None:
    """Read a version's weights, or a shard of them, into a slab. `layout` is the shard's. `helpers`: threads
    that read parts of it at the same time.

    The files must be those of this version: if their fingerprint differs, they are hashed again. They must
    not change until the end.
    """
    with open_regular(spec.weights_path) as file:
        fingerprint = _checked_fingerprint(spec, file, shard.whole(layout.shape))
        try:
            header = parse_header(file)
        except (FileCutShortError, AdapterFormatError) as error:
            raise AdapterFormatError(_CHANGED) from error
        reads: list[Future[None]] = []
        try:
            for part in _parts(_matrices(layout, header, shard, slab)):
                if helpers is None:
                    _read_part(file.fileno(), part, slab)
                else:
                    reads.append(helpers.submit(_read_part, file.fileno(), part, slab))
        finally:
            # Wait for all: none may go on reading a closed file, or into memory that is reused.
            wait(reads)
        for read in reads:
            read.result()
        if _fingerprint(spec, file) != fingerprint:
            raise AdapterFormatError(_CHANGED)


class SlabReaders:
    """Calls `read_slab` with a few helper threads: a single core copies no faster than a good disk reads.

    Every read has helpers of its own until it ends, so that a read that hangs does not block others.
    """

    def __init__(self, shard: Shard = WHOLE) -> None:
        self._shard = shard
        self._num_helpers = min(os.cpu_count() or 1, _MAX_HELPERS)
        first = HelperThreads(self._num_helpers)
        first.submit(compile_reader)  # so that the first read does not wait for it
        self._lock = threading.Lock()  # guards the fields below
        self._idle = [first]
        self._is_closed = False

    def __call__(self, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        with self._lock:
            helpers = self._idle.pop() if self._idle else HelperThreads(self._num_helpers)
        try:
            read_slab(spec, layout, slab, self._shard, helpers)
        finally:
            self._take_back(helpers)

    def close(self) -> None:
        """End the threads; those of a read in flight end with it."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for helpers in idle:
            helpers.shutdown()

    def _take_back(self, helpers: HelperThreads) -> None:
        with self._lock:
            keeps = not self._is_closed and len(self._idle) < _MAX_IDLE
            if keeps:
                self._idle.append(helpers)
        if not keeps:
            helpers.shutdown()


def _matrices(
    layout: SlabLayout, header: WeightsHeader, shard: Shard, slab: torch.Tensor
) -> Iterator[_Matrix]:
    """Yield the matrices in the order of the slab, layer by layer."""
    address, element_bytes = slab.data_ptr(), slab.itemsize
    for slot in (slot for groups in layout.layers for slots in groups.values() for slot in slots):
        rank, by_input = slot.lora.rank, slot.lora.module in CUT_BY_INPUT
        in_features = slot.in_features * (shard.count if by_input else 1)
        out_features = slot.out_features * (1 if by_input else shard.count)
        a_info = _tensor(header, slot.lora.a_name, [rank, in_features])
        b_info = _tensor(header, slot.lora.b_name, [out_features, rank])
        a_columns = shard.part(in_features) if by_input else slice(0, in_features)
        b_rows = slice(0, out_features) if by_input else shard.part(out_features)
        for info, rows, columns, start in (
            (a_info, slice(0, rank), a_columns, slot.a_start),
            (b_info, b_rows, slice(0, rank), slot.b_start),
        ):
            dtype, num_columns = _SOURCE_DTYPES[info.dtype], info.shape[1]
            place = FileMatrix(
                header.data_start + info.begin + rows.start * num_columns * dtype.itemsize,
                rows.stop - rows.start,
                num_columns,
                columns.start,
                columns.stop,
                address + start * element_bytes,
                info is b_info,
                dtype.itemsize,
            )
            yield _Matrix(place, dtype)


def _tensor(header: WeightsHeader, name: str, shape: list[int]) -> TensorInfo:
    """Return the tensor if it has the expected shape, or raise: a file that is being written may contain
    anything."""
    found = header.tensors.get(name)
    is_known = found is not None and found.shape == shape and str(found.dtype) in _SOURCE_DTYPES
    if found is None or not is_known or type(found.begin) is not int or found.begin < 0:
        raise AdapterFormatError(_CHANGED)
    return found


def _parts(matrices: Iterable[_Matrix]) -> Iterator[list[_Matrix]]:
    """Split matrices into runs of about the same size."""
    part: list[_Matrix] = []
    num_bytes = 0
    for matrix in matrices:
        part.append(matrix)
        num_bytes += matrix.place.num_rows * matrix.place.row_bytes
        if num_bytes >= _PART_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def _read_part(fd: int, part: Sequence[_Matrix], slab: torch.Tensor) -> None:
    plain = [matrix for matrix in part if matrix.dtype == slab.dtype]
    places = [matrix.place for matrix in plain]
    num_read = read_matrices(fd, places, _scratch(max((place.row_bytes for place in places), default=0)))
    if num_read < len(plain):
        plain[num_read].read(fd, slab)  # raises the error
        _read_part(fd, plain[num_read + 1 :], slab)
    for matrix in part:
        if matrix.dtype != slab.dtype:
            matrix.read(fd, slab)


def _scratch(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return this thread's buffer, kept because newly allocated memory costs page faults."""
    found: npt.NDArray[np.uint8] | None = getattr(_own, "scratch", None)
    if found is None or found.nbytes < num_bytes:
        found = _own.scratch = np.empty(max(num_bytes, _PIECE_BYTES), dtype=np.uint8)
    return found


_own = threading.local()


def _checked_fingerprint(spec: AdapterSpec, file: FileIO, shape: ModelShape) -> str:
    """Return the fingerprint of the files, which must hold the registered version. They may have been
    touched, or restored, since then. `shape` is the whole model's."""
    fingerprint = _fingerprint(spec, file)
    if fingerprint == spec.fingerprint:
        return fingerprint
    try:
        found = read_adapter(spec.path, shape)
    except AdapterError as error:
        raise AdapterFormatError(_CHANGED) from error
    # The hashed file must be the one opened here.
    if found.version != spec.version or found.fingerprint != fingerprint:
        raise AdapterFormatError(_CHANGED)
    return fingerprint


def _fingerprint(spec: AdapterSpec, file: FileIO) -> str:
    """Return the fingerprint of the open weights file and the configuration."""
    return join_fingerprints(weights=os.fstat(file.fileno()), config=os.stat(spec.path / CONFIG_FILE))


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
