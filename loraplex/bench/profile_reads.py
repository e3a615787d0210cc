"""Measures reads of adapters as the engine does them: from real files, by its reader, into its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch

from loraplex.adapters.slab import slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.adapter_files import save_random_adapters
from loraplex.bench.alternating import time_alternating, undisturbed
from loraplex.bench.profile_host import Predicted, Report, predictions
from loraplex.core.errors import StorageError
from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_loader import read_weights, resident_bytes
from loraplex.engine.cuda.adapter_block import block_bytes
from loraplex.engine.cuda.host_memory import HostMemory
from loraplex.engine.slab_reader import SlabReaders, read_slab
from loraplex.perf.line import Line, fit_line

_MODULES: Final = ("q_proj", "k_proj", "v_proj")
_MIN_RANK: Final = 4
_MAX_RANK: Final = 1024
_LARGEST_BYTES: Final = 64 << 20
"""Most bytes of one adapter; all files together are up to six times as large."""
_NUM_FITTED: Final = 7
_MEMORY_BYTES: Final = 512 << 20
"""Bytes of the memory that adapters are read into, one after the other: memory that was just written would
still be in the processor's caches."""
_PLACE_BYTES: Final = 4096
_MAX_SHOTS: Final = 15
_SHOTS_S: Final = 0.1

Read = Callable[[AdapterSpec], object]


def measure_reads(
    folder: Path, shape: ModelShape, dtype: torch.dtype, *, on_gpu: bool, repeats: int, report: Report
) -> tuple[Line, list[Predicted]]:
    """Fit the seconds of a read to the bytes that an adapter takes in memory, its file in the page cache, and
    predict other sizes by the fit. On a GPU a few threads read, to pinned memory."""
    fitted, held_out = _ranks(shape, dtype)
    ranks = (*fitted, *held_out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            TemporaryDirectory(dir=folder, prefix="profile-") as name,
            _pinned_reader(shape, dtype) if on_gpu else _plain_reader(shape, dtype) as read,
        ):
            specs = [_saved(Path(name), shape, dtype, rank) for rank in ranks]
            took_s = time_alternating(
                [partial(_seconds, read, spec) for spec in specs], repeats=repeats, report=report
            )
            sizes = [resident_bytes(spec, shape, dtype) for spec in specs]
    except OSError as error:
        raise StorageError(
            f"{folder}: adapters cannot be written and read there ({error.strerror}); make room, or name "
            "another folder with LORAPLEX_CACHE"
        ) from error
    samples = list(zip(sizes, took_s, strict=True))
    line = fit_line(samples[: len(fitted)])
    return line, predictions(line, samples[len(fitted) :])


def _ranks(shape: ModelShape, dtype: torch.dtype) -> tuple[list[int], list[int]]:
    """Return the ranks to fit, each larger than the one before by the same factor, and held-out ranks between
    them, if these are far enough apart."""
    features = sum(shape.in_features(module) + shape.out_features(module) for module in _MODULES)
    rank_bytes = features * shape.num_layers * dtype.itemsize
    most = min(max(_LARGEST_BYTES // rank_bytes, 2 * _MIN_RANK), _MAX_RANK)
    factor = (most / _MIN_RANK) ** (1 / (_NUM_FITTED - 1))
    fitted = [round(_MIN_RANK * factor**step) for step in range(_NUM_FITTED)]
    held_out = [round(_MIN_RANK * factor ** (step + 0.5)) for step in range(_NUM_FITTED - 1)]
    return fitted, held_out


def _saved(folder: Path, shape: ModelShape, dtype: torch.dtype, rank: int) -> AdapterSpec:
    [spec] = save_random_adapters(folder / f"rank-{rank}", shape, dtype, count=1, rank=rank, modules=_MODULES)
    return spec


def _seconds(read: Read, spec: AdapterSpec) -> float:
    """Return the seconds of one read, from several measurements if it is short."""
    shots_s: list[float] = []
    while len(shots_s) < _MAX_SHOTS and sum(shots_s) < _SHOTS_S:
        started = time.perf_counter()
        read(spec)
        shots_s.append(time.perf_counter() - started)
    return undisturbed(shots_s)


@contextmanager
def _plain_reader(shape: ModelShape, dtype: torch.dtype) -> Iterator[Read]:
    """Yield a reader into memory of the adapter's own, as in the engine of a CPU."""
    yield lambda spec: read_weights(spec, shape, dtype, read_slab)


@contextmanager
def _pinned_reader(shape: ModelShape, dtype: torch.dtype, *, pinned: bool = True) -> Iterator[Read]:
    from loraplex.engine.cuda.host_blocks import HostPool  # needs Triton, which a CPU does not

    memory, readers = HostMemory(_MEMORY_BYTES, pinned=pinned), SlabReaders()
    pool = HostPool(shape, dtype, memory, readers, readers.close)
    memory.take(0, _MEMORY_BYTES)
    place = 0

    def read(spec: AdapterSpec) -> None:
        nonlocal place
        num_bytes = block_bytes(slab_layout(spec, shape), shape, dtype)
        place = place if place + num_bytes <= _MEMORY_BYTES else 0
        pool.read(spec, place)
        place += -(-num_bytes // _PLACE_BYTES) * _PLACE_BYTES

    try:
        yield read
    finally:
        pool.close()
