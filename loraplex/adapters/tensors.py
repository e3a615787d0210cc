"""The weights file: its header, its hash, and the check that all numbers in it are finite.

File layout (safetensors): 8 bytes header length n, little-endian; n bytes of JSON; the tensors' data,
without gaps or overlaps.

Data is read, not mapped: if a mapped file is truncated while in use, SIGBUS kills the process, and files that
are still being copied are exactly what this code must survive.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from itertools import groupby
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from loraplex.adapters.spec import WEIGHTS_FILE
from loraplex.core.errors import AdapterFormatError

HEADER_LENGTH_BYTES: Final = 8

_CHUNK_BYTES: Final = (
    1 << 20
)  # stays in the L2 cache between hashing and checking; a multiple of every itemsize

_GIT_LFS_MAGIC: Final = b"version https://git-lfs"
_PICKLE_MAGICS: Final = (b"PK\x03\x04", b"\x80\x02")


class Hash(Protocol):
    """The part of a hashlib object that is used here."""

    def update(self, data: memoryview | bytes, /) -> None: ...


class FileCutShortError(Exception):
    """The file ended before its header said it would: it changed after the header was checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _FloatFormat:
    """A float type viewed as integers of its size; bit patterns above infinity's are all NaNs."""

    signed: npt.DTypeLike
    unsigned: npt.DTypeLike
    num_bytes: int
    infinity_bits: int

    def has_nonfinite(self, chunk: memoryview) -> bool:
        """Return whether a chunk holds an infinity or NaN.

        Takes two maxima without temporaries: as signed integers the positive floats are in order; as unsigned
        ones the negative floats come last, in order of magnitude.
        """
        sign_bit = 1 << (8 * self.num_bytes - 1)
        if np.frombuffer(chunk, dtype=self.signed).max() >= self.infinity_bits:
            return True
        return bool(np.frombuffer(chunk, dtype=self.unsigned).max() >= self.infinity_bits | sign_bit)

    def first_nonfinite(self, chunk: memoryview) -> int:
        """Return the byte offset of the first infinity or NaN of a chunk that has one."""
        bits = np.frombuffer(chunk, dtype=self.unsigned)
        return int(np.argmax((bits & self.infinity_bits) == self.infinity_bits)) * self.num_bytes


_FORMATS: Final = {
    "F32": _FloatFormat(signed="<i4", unsigned="<u4", num_bytes=4, infinity_bits=0x7F800000),
    "F16": _FloatFormat(signed="<i2", unsigned="<u2", num_bytes=2, infinity_bits=0x7C00),
    "BF16": _FloatFormat(signed="<i2", unsigned="<u2", num_bytes=2, infinity_bits=0x7F80),
}

SUPPORTED_DTYPES: Final = frozenset(_FORMATS)


class TensorInfo(NamedTuple):
    """A tensor of the file; `begin` and `end` are byte offsets from the start of the data."""

    dtype: str
    shape: list[int]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsHeader:
    """The parsed header. `raw` is the file's bytes up to the data."""

    raw: bytes
    tensors: dict[str, TensorInfo]

    @property
    def data_start(self) -> int:
        return len(self.raw)


def read_header(file: FileIO) -> WeightsHeader:
    """Validate an open file with the safetensors library, then parse the header.

    `file` is at its beginning and is left at the first byte of the data. The library is given the
    descriptor's path, since the file at the original path may have been replaced. Raises AdapterFormatError
    for anything that is not a sound safetensors file.
    """
    try:
        with safe_open(f"/dev/fd/{file.fileno()}", framework="numpy"):
            pass
    except (SafetensorError, ValueError) as exc:
        raise _not_safetensors(file, exc) from exc
    return parse_header(file)


def parse_header(file: FileIO) -> WeightsHeader:
    """Parse the header of a file that was validated before. Data offsets are not checked again here.

    Raises FileCutShortError if the file is shorter than its header, AdapterFormatError if that is damaged.
    """
    length_bytes = _read_exactly(file, HEADER_LENGTH_BYTES)
    length = int.from_bytes(length_bytes, "little")
    if length > os.fstat(file.fileno()).st_size - HEADER_LENGTH_BYTES:
        raise FileCutShortError
    header_json = _read_exactly(file, length)
    try:
        header = json.loads(header_json)
        header.pop("__metadata__", None)
        tensors = {
            name: TensorInfo(entry["dtype"], entry["shape"], *entry["data_offsets"])
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as exc:
        raise AdapterFormatError(
            f"{WEIGHTS_FILE} has a damaged header ({exc}); save or copy it again"
        ) from exc
    return WeightsHeader(raw=length_bytes + header_json, tensors=tensors)


def scan_data(file: FileIO, header: WeightsHeader, hashes: Hash) -> AdapterFormatError | None:
    """Read all data once: feed it to `hashes` and return an error that names the first infinity or NaN, if
    any.

    Every dtype must be one of SUPPORTED_DTYPES. Raises FileCutShortError if the data end too early.
    """
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    problem: AdapterFormatError | None = None
    hashes.update(header.raw)
    for begin, end, dtype in _segments(header):
        float_format = _FORMATS[dtype]
        for offset in range(begin, end, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, end - offset)]
            _read_into(file, chunk)
            hashes.update(chunk)
            if problem is None and float_format.has_nonfinite(chunk):
                problem = _nonfinite(header, offset + float_format.first_nonfinite(chunk))
    return problem


def _segments(header: WeightsHeader) -> Iterator[tuple[int, int, str]]:
    """Yield (begin, end, dtype) of runs of adjoining tensors of one dtype, in file order: usually one run."""
    in_order = sorted(
        (each for each in header.tensors.values() if each.num_bytes), key=lambda each: each.begin
    )
    for dtype, run in groupby(in_order, key=lambda each: each.dtype):
        tensors = list(run)
        yield tensors[0].begin, tensors[-1].end, dtype


def _nonfinite(header: WeightsHeader, offset: int) -> AdapterFormatError:
    in_order = sorted(header.tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    place = bisect_right(in_order, offset, key=lambda item: item[1].begin) - 1
    name, _ = in_order[place]
    return AdapterFormatError(
        f"{WEIGHTS_FILE}: tensor {name} holds NaN or infinity; the training run diverged or the save went "
        "wrong: use an earlier checkpoint",
        field=name,
    )


def _not_safetensors(file: FileIO, exc: Exception) -> AdapterFormatError:
    start = file.read(32) or b""
    if not start:
        why = "is empty; save or copy it again"
    elif start.startswith(_GIT_LFS_MAGIC):
        why = "is a Git LFS pointer, not the weights; run `git lfs pull`"
    elif start.startswith(_PICKLE_MAGICS):
        why = "is a PyTorch pickle under another name, which is never opened; save it with safetensors"
    else:
        why = f"is not a sound safetensors file ({exc}); save or copy it again"
    return AdapterFormatError(f"{WEIGHTS_FILE} {why}")


def _read_exactly(file: FileIO, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _read_into(file, memoryview(data))
    return bytes(data)


def _read_into(file: FileIO, target: memoryview) -> None:
    num_done = 0
    while num_done < len(target):
        num_read = file.readinto(target[num_done:])
        if not num_read:
            raise FileCutShortError
        num_done += num_read
