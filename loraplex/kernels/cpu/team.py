"""Runs compiled kernels on torch's own thread team.

A second thread pool beside torch's would compete for the cores: OpenMP workers spin for a while after each
region, so the other pool's workers wait for a time slice. Torch's wheels carry GNU OpenMP; its entry point
`GOMP_parallel` runs any C function on the team that torch uses, in about two microseconds.

A kernel is a numba `cfunc` of one pointer: an int64 argument block whose first element is a shared counter.
Threads claim work items from it (`intrinsics.claim`) until none is left, so a kernel is correct on any number
of threads, including one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import torch
from numba import cfunc

from loraplex.core.paths import cache_dir


def kernel(function: Callable[[Any], None]) -> int:
    """Compile a kernel body (cached on disk) and return its address. One at a time: numba's cache folder is a
    global setting."""
    with _compiling, _disk_cache() as is_cached:
        compiled = cfunc("void(CPointer(int64))", cache=is_cached, nopython=True)(function)
    _keep_alive.append(compiled)
    return int(compiled.address)


@contextmanager
def _disk_cache() -> Iterator[bool]:
    """Set numba's cache to a folder named after a hash of the kernels' sources; yield False where it cannot
    be written.

    numba's own cache notices only changes of the file that defines a kernel, not of the files it calls into.
    """
    folder = cache_dir() / "kernels" / _source_hash()
    before = numba.config.CACHE_DIR
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        yield False
        return
    numba.config.CACHE_DIR = str(folder)
    try:
        yield os.access(folder, os.W_OK)
    finally:
        numba.config.CACHE_DIR = before


@lru_cache(maxsize=1)
def _source_hash() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


_compiling = threading.Lock()
_keep_alive: list[Any] = []
"""Compiled code lives as long as its object; addresses are valid for the life of the process."""


def run(kernel_address: int, args: Sequence[int]) -> None:
    """Run a kernel on torch's threads and wait for it. `args` follow the counter in the argument block."""
    block = (ctypes.c_int64 * (len(args) + 1))(0, *args)
    _launcher()(kernel_address, block)


@lru_cache(maxsize=1)
def _launcher() -> Callable[[int, Any], None]:
    parallel = _find_gomp_parallel()
    if parallel is None:
        return _run_serially

    def launch(kernel_address: int, block: Any) -> None:
        parallel(kernel_address, block, torch.get_num_threads(), 0)

    return launch


def _run_serially(kernel_address: int, block: Any) -> None:
    _SERIAL_KERNEL(kernel_address)(block)


_SERIAL_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_gomp_parallel() -> Any | None:
    """Return `GOMP_parallel` of the OpenMP runtime that torch loaded; None where torch uses another
    runtime."""
    folder = Path(torch.__file__).parent
    for library in sorted([*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]):
        try:
            function = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None
