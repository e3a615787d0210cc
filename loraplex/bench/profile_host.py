"""Measurements of `loraplex profile` without the engine: the bus and the disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final, NamedTuple

import torch

from loraplex.bench.alternating import time_alternating
from loraplex.core.errors import StorageError
from loraplex.engine.cuda.streams import SideStream
from loraplex.perf.layer_pipeline import Bus
from loraplex.perf.line import Line, fit_line

Report = Callable[[float], None]

_MIB: Final = 1 << 20
_COPY_SIZES: Final = tuple(num_kib << 10 for num_kib in (64, 256, 1024, 4096, 16384, 65536, 131072))
_HELD_OUT_SIZES: Final = tuple(num_kib << 10 for num_kib in (160, 700, 3000, 12000, 50000, 100000))
_NUM_CUTS: Final = 32
_DISK_SIZES: Final = tuple(num_kib << 10 for num_kib in (1024, 4096, 16384, 65536))


class Predicted(NamedTuple):
    """A prediction of a sample that was not fitted, and the measurement."""

    predicted_s: float
    measured_s: float


def predictions(line: Line, samples: Sequence[tuple[int, float]]) -> list[Predicted]:
    return [Predicted(line.seconds(amount), seconds) for amount, seconds in samples]


def measure_bus(device: torch.device, repeats: int, report: Report) -> tuple[Bus, list[Predicted]]:
    """Measure copies from pinned memory on a stream of their own, as adapters are loaded. Return the fit, and
    its predictions of copies of other sizes."""
    largest = _COPY_SIZES[-1]
    host = torch.zeros(largest, dtype=torch.uint8, pin_memory=True)
    target = torch.zeros(largest, dtype=torch.uint8, device=device)
    stream = SideStream(device)
    torch.cuda.synchronize()

    def copy(num_bytes: int, num_copies: int) -> float:
        parts = list(
            zip(target[:num_bytes].chunk(num_copies), host[:num_bytes].chunk(num_copies), strict=True)
        )
        started = time.perf_counter()
        with stream.entered():
            for to, source in parts:
                to.copy_(source, non_blocking=True)
        stream.synchronize()
        return time.perf_counter() - started

    sizes = (*_COPY_SIZES, *_HELD_OUT_SIZES)
    *copied_s, cut_s = time_alternating(
        [*(partial(copy, size, 1) for size in sizes), partial(copy, largest, _NUM_CUTS)],
        repeats=repeats,
        report=report,
    )
    samples, border = list(zip(sizes, copied_s, strict=True)), len(_COPY_SIZES)
    line = fit_line(samples[:border])
    launch_s = max(cut_s - copied_s[border - 1], 0.0) / (_NUM_CUTS - 1)
    return Bus(copy=line, launch_s=launch_s), predictions(line, samples[border:])


def measure_disk(folder: Path, *, repeats: int, report: Report) -> Line:
    """Measure reads of a file that was dropped from the page cache; from the cache where it cannot be
    dropped."""
    with _file(folder, _DISK_SIZES[-1]) as file:
        buffer = memoryview(bytearray(_DISK_SIZES[-1]))

        def read(num_bytes: int) -> float:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            _read_part(file, buffer[:num_bytes], 0)
            return time.perf_counter() - started

        took_s = time_alternating(
            [partial(read, size) for size in _DISK_SIZES], repeats=repeats, report=report
        )
    return fit_line(list(zip(_DISK_SIZES, took_s, strict=True)))


@contextmanager
def _file(folder: Path, num_bytes: int) -> Iterator[int]:
    """Write a file of random bytes to disk and yield its descriptor; delete the file afterwards."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix="profile-") as file:
            content = os.urandom(_MIB)
            for start in range(0, num_bytes, _MIB):
                file.write(content[: num_bytes - start])
            file.flush()
            os.fsync(file.fileno())
            yield file.fileno()
    except OSError as error:
        raise StorageError(
            f"{folder}: a file of {num_bytes:,} bytes cannot be written and read there ({error.strerror}); "
            "make room, or name another folder with LORAPLEX_CACHE"
        ) from error


def _read_part(file: int, into: memoryview, start: int) -> None:
    done = 0
    while done < len(into):
        num_read = os.preadv(file, [into[done:]], start + done)
        assert num_read > 0, "the file was cut short"
        done += num_read
