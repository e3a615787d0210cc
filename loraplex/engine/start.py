"""Starts an engine in a process of its own: slow initialisation runs beside the import of torch."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

from loraplex.engine.cuda.triton_hash import hash_triton
from loraplex.engine.options import EngineOptions

if TYPE_CHECKING:
    from loraplex.engine.core import Engine
    from loraplex.engine.parallel.messages import Progress
    from loraplex.engine.peers import Peers


def build_core(
    options: EngineOptions, progress: Progress | None = None, peers: Peers | None = None
) -> Engine:
    """Call `loraplex.engine.build.build_core`, with initialisation started beside its imports."""
    if options.device != "cpu":
        begin_beside_imports()
    from loraplex.engine.build import build_core as build

    return build(options, progress, peers)


def begin_beside_imports() -> None:
    """Start threads for what an engine on a GPU needs and torch does not. They hold the GIL only briefly,
    between long calls."""
    threading.Thread(target=create_context, name="cuda-context", daemon=True).start()
    threading.Thread(target=_hash_triton, name="triton-hash", daemon=True).start()


def create_context() -> None:
    """Create the context that torch will use on the first device. If it fails, torch reports why."""
    cuda = _driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda is not None and cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _hash_triton() -> None:
    """Hash Triton if it may be used: without a driver the engine runs on a CPU."""
    if _driver() is not None:
        hash_triton()


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
