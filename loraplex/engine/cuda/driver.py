"""The few calls of CUDA's driver that torch has no names for.

The driver's own: a call that fails leaves no error behind for whoever calls the runtime next.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.errors import EngineDeadError

_PORTABLE, _MAPPED = 1, 2
_WAIT, _WRITE = 4, 5
"""CU_STREAM_MEM_OP_WAIT_VALUE_64, CU_STREAM_MEM_OP_WRITE_VALUE_64"""
_WORDS: Final = 6
"""Of an operation: its kind, the address, the value. Of the others, 0 stands for "at least" where it waits,
and for "behind all that was written before" where it writes."""
_VALUE: Final = 2


def pin(address: int, num_bytes: int) -> int:
    """Pin memory of the host, for all devices to copy from and to use; 0, or the number of the error."""
    flags = _PORTABLE | _MAPPED
    return int(_driver().cuMemHostRegister_v2(_pointer(address), ctypes.c_size_t(num_bytes), flags))


def unpin(address: int) -> None:
    _check(_driver().cuMemHostUnregister(_pointer(address)), "unpin memory of the host")


def device_address(address: int) -> int:
    """Where the device sees pinned memory of the host."""
    found = ctypes.c_uint64()
    error = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(found), _pointer(address), 0)
    _check(error, "use memory of the host")
    return int(found.value)


def copy_to_device(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Behind all that was launched on the stream; returns at once if the source is pinned."""
    error = _copy()(target, source, num_bytes, stream)
    if error != 0:
        _check(error, "copy from the host")


def write_word(address: int, value: int, stream: int) -> None:
    """To eight bytes of the device, behind all that was launched on the stream."""
    error = _write()(stream, address, value, 0)
    if error != 0:
        _check(error, "write its own memory")


class StreamWords:
    """Words in memory of the host that streams write, or wait for; all of them in one call."""

    def __init__(self, kind: int, addresses: list[int]) -> None:
        self._operations: npt.NDArray[np.int64] = np.zeros((len(addresses), _WORDS), dtype=np.int64)
        self._operations[:, 0] = kind
        self._operations[:, 1] = [device_address(address) for address in addresses]
        self._call = _driver().cuStreamBatchMemOp_v2
        self._pointer = _pointer(self._operations.ctypes.data)

    def put(self, value: int) -> None:
        """On the current stream."""
        self._operations[:, _VALUE] = value
        stream = _pointer(torch.cuda.current_stream().cuda_stream)
        _check(self._call(stream, len(self._operations), self._pointer, 0), "signal CPU LoRA workers")


def written_words(addresses: list[int]) -> StreamWords:
    """Streams write the value there, behind all that was launched before."""
    return StreamWords(_WRITE, addresses)


def awaited_words(addresses: list[int]) -> StreamWords:
    """What streams do next comes when all of them have at least the value."""
    return StreamWords(_WAIT, addresses)


@lru_cache(maxsize=1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=1)
def _copy() -> Any:
    function = _driver().cuMemcpyHtoDAsync_v2
    function.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
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
