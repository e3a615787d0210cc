"""Begins the engine of a process of its own: what takes long runs beside the import of torch."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

from loraplex.engine.cuda.triton_hash import hash_triton
from loraplex.engine.options import EngineOptions

if TYPE_CHECKING:
    from loraplex.engine.core import Engine
    from loraplex.engine.parallel.messages import Progress


def build_core(options: EngineOptions, progress: Progress | None = None) -> Engine:
    """`loraplex.engine.build.build_core`, sooner."""
    if options.device != "cpu":
        # Each needs the interpreter for moments only, between long calls.
        for work in (create_context, hash_triton):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
    from loraplex.engine.build import build_core as build

    return build(options, progress)


def create_context() -> None:
    """Create the context that torch will find on the first device. Where that fails, torch says why."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # no driver
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
