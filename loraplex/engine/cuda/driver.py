"""The few calls of CUDA's driver that torch does not expose.

A driver call that fails, unlike one of the runtime, leaves no error behind for the next call to report.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from loraplex.core.errors import EngineDeadError

_PORTABLE, _MAPPED = 1, 2


def pin(address: int, num_bytes: int) -> int:
    """Pin host memory for all devices, to copy from and to access. Return 0, or the error's number."""
    flags = _PORTABLE | _MAPPED
    return int(_driver().cuMemHostRegister_v2(_pointer(address), ctypes.c_size_t(num_bytes), flags))


def unpin(address: int) -> None:
    _check(_driver().cuMemHostUnregister(_pointer(address)), "unpin memory of the host")


def copy_to_device(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy after everything launched on the stream so far. Returns at once if the source is pinned."""
    error = _copy()(target, source, num_bytes, stream)
    if error != 0:
        _check(error, "copy from the host")


def copy_to_host(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy after everything launched on the stream so far. Returns at once if the target is pinned."""
    error = _copy_back()(target, source, num_bytes, stream)
    if error != 0:
        _check(error, "copy to the host")


def write_word(address: int, value: int, stream: int) -> None:
    """Write eight bytes of device memory after everything launched on the stream so far."""
    error = _write()(stream, address, value, 0)
    if error != 0:
        _check(error, "write its own memory")


@lru_cache(maxsize=1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=1)
def _copy() -> Any:
    function = _driver().cuMemcpyHtoDAsync_v2
    function.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return function


@lru_cache(maxsize=1)
def _copy_back() -> Any:
    function = _driver().cuMemcpyDtoHAsync_v2
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return function


@lru_cache(maxsize=1)
def _write() -> Any:
    function = getattr(_driver(), "cuStreamWriteValue64_v2", None)
    if function is None:
        raise EngineDeadError("the GPU's driver is too old; install one for CUDA 12 or newer")
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
    return function


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _check(error: int, what: str) -> None:
    if error != 0:
        raise EngineDeadError(f"the GPU cannot {what} (CUDA error {error}); see the driver's log")
