"""Host memory that a device copies adapters or KV blocks from, and CPU workers compute with.

Its addresses are reserved at once. Memory is allocated and pinned piece by piece as it is used, because
pinning is slow, and only copies from pinned memory run beside the steps at the full speed of the bus. A piece
stays pinned.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

import torch

from loraplex.core.errors import CapacityError
from loraplex.engine.assist.shared_block import SharedBlock
from loraplex.engine.cuda import driver
from loraplex.engine.helper_threads import HelperThreads
from loraplex.engine.machine import available_bytes

logger = logging.getLogger(__name__)

_NO_RESERVE: Final = 0x4000
"""MAP_NORESERVE"""
_POPULATE: Final = 23
"""MADV_POPULATE_WRITE"""
_DEFAULT_SHARE: Final = 0.25
_MAX_DEFAULT_BYTES: Final = 64 << 30
_PIECE_BYTES: Final = 64 << 20
_POPULATED_BYTES: Final = 8 << 20
_MAX_POPULATING: Final = 8
"""Most threads that allocate pages at once, `_POPULATED_BYTES` at a time each: one thread alone is slow to
get pages that a virtual machine never used."""
_PINNED_AHEAD_BYTES: Final = 1 << 30
"""Bytes pinned before they are used: half a second of adapters from a fast disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A use of memory, as error messages name it, and the option that sets its size. `must_pin`: memory
    that cannot be pinned is of no use."""

    what: str
    option: str
    must_pin: bool = False


ADAPTERS: Final = Use(what="adapters", option="--host-adapter-memory")
KV_SWAP: Final = Use(what="keys and values", option="--kv-swap-memory", must_pin=True)


def default_host_bytes() -> int:
    """Return the default budget for adapters in host memory, for all shards together."""
    return int(min(available_bytes() * _DEFAULT_SHARE, _MAX_DEFAULT_BYTES))


class HostMemory:
    """Host memory. That of adapters is used from the top downwards (`scheduling.host_room`)."""

    def __init__(
        self,
        num_bytes: int,
        *,
        pinned: bool,
        shared: bool = False,
        piece_bytes: int = _PIECE_BYTES,
        use: Use = ADAPTERS,
    ) -> None:
        """`shared`: other processes may map it."""
        self._num_bytes = num_bytes
        self._pins = pinned
        self._piece_bytes = piece_bytes
        self._use = use
        if use.must_pin and num_bytes > available_bytes():  # all of it is taken at once
            raise CapacityError(f"the host has no {num_bytes:,} bytes for {use.what}; lower {use.option}")
        try:
            self._pages: _Pages = (_SharedPages if shared else _LargePages)(max(num_bytes, 1))
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise CapacityError(
                f"the host has no {num_bytes:,} bytes for {use.what}; lower {use.option}"
            ) from error
        self._bytes = self._pages.memory
        self.address = self._bytes.data_ptr()
        self._taken: set[int] = set()  # pieces that are allocated
        self._pinned: dict[int, bool] = {}  # by piece: whether pinning succeeded
        self._is_exhausted = False  # when last pinned ahead; nothing was allocated since
        self._lock = threading.Lock()
        self._lowest = num_bytes

    @property
    def block(self) -> SharedBlock:
        """The block that other processes map."""
        assert isinstance(self._pages, _SharedPages)
        return self._pages.block

    def span(self, begin: int, end: int) -> torch.Tensor:
        return self._bytes[begin:end]

    def take(self, begin: int, end: int) -> torch.Tensor:
        """Return memory to fill, allocated and, where possible, pinned. May be called on any thread. Raises
        CapacityError."""
        assert 0 <= begin <= end <= self._num_bytes, "outside of this memory"
        with self._lock:
            self._lowest = min(self._lowest, begin)
        for piece in range(begin // self._piece_bytes, -(-end // self._piece_bytes)):
            self._take(piece)
        return self.span(begin, end)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the range cut at the borders of pieces, which one copy may not cross."""
        while begin < end:
            cut = min(end, (begin // self._piece_bytes + 1) * self._piece_bytes)
            yield begin, cut
            begin = cut

    def pin_ahead(self) -> bool:
        """Pin one of the pieces that will be used next; False if enough are pinned, or memory is
        exhausted."""
        if not self._pins or self._is_exhausted:
            return False
        bottom = max(self._lowest - _PINNED_AHEAD_BYTES, 0)
        for piece in range(-(-self._lowest // self._piece_bytes) - 1, bottom // self._piece_bytes - 1, -1):
            if piece not in self._pinned:
                try:
                    self._take(piece)
                except CapacityError as error:
                    logger.warning("%s", error)
                    self._is_exhausted = True
                return not self._is_exhausted
        return False

    def close(self) -> None:
        """Unpin and free the memory; call it after the last copy."""
        with self._lock:
            try:
                for piece in [piece for piece, pinned in self._pinned.items() if pinned]:
                    driver.unpin(self._piece(piece).data_ptr())
            finally:  # also if the device is broken and unpins nothing
                self._pinned.clear()
                self._pages.close()
                self._bytes = self._pages.memory = torch.empty(0, dtype=torch.uint8)

    def leave(self) -> None:
        """Keep it mapped and pinned until the process ends, because a read may still write to it."""
        _LEFT.append(self._pages)

    def _piece(self, piece: int) -> torch.Tensor:
        return self._bytes[piece * self._piece_bytes : min((piece + 1) * self._piece_bytes, self._num_bytes)]

    def _take(self, piece: int) -> None:
        with self._lock:
            memory = self._piece(piece)
            if piece not in self._taken:
                self._allocate(piece * self._piece_bytes, memory.numel())
                self._taken.add(piece)
                self._is_exhausted = False
            if not self._pins or piece in self._pinned:
                return
            error = driver.pin(memory.data_ptr(), memory.numel())
            self._pinned[piece] = error == 0
            if error != 0 and self._use.must_pin:
                raise CapacityError(
                    f"the host cannot pin {self._num_bytes:,} bytes for {self._use.what} (CUDA error "
                    f"{error}); lower {self._use.option}, or raise the limit on locked memory (ulimit -l)"
                )
            if error != 0:
                logger.warning("host memory cannot be pinned (CUDA error %d): adapters load slower", error)

    def _allocate(self, begin: int, num_bytes: int) -> None:
        """Allocate all pages now: if one were unavailable later, touching it would kill the process. Raises
        CapacityError."""
        try:
            if num_bytes > available_bytes():
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            self._pages.allocate(begin, num_bytes)
        except OSError as error:
            raise CapacityError(
                f"the host has no memory left for {self._use.what} ({error.strerror}); free some, or lower "
                f"{self._use.option}"
            ) from error


class _Pages(Protocol):
    """Reserved addresses, backed by memory where it was allocated."""

    memory: torch.Tensor

    def allocate(self, begin: int, num_bytes: int) -> None:
        """Allocate a range. Raises OSError if there is no memory."""
        ...

    def close(self) -> None: ...


_LEFT: Final[list[_Pages]] = []
"""Memory leaked deliberately: a thread that hangs in a read cannot be ended, and nothing is left to unpin the
memory when it returns. Pages unmapped while pinned would break the next mapping at their addresses."""


class _SharedPages:
    """Memory that other processes map."""

    def __init__(self, num_bytes: int) -> None:
        fd = os.memfd_create("loraplex-adapters", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        self.block = SharedBlock(num_bytes, fd=fd)
        self.memory = self.block.memory

    def allocate(self, begin: int, num_bytes: int) -> None:
        os.posix_fallocate(self.block.fd, begin, num_bytes)

    def close(self) -> None:
        self.block.close()


class _LargePages:
    """Memory of this process, in large pages where the system has them: they are allocated and pinned several
    times as fast."""

    def __init__(self, num_bytes: int) -> None:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        with suppress(OSError):  # a system without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        # A forked process would share the pages until one of the two writes to them; then they may no longer
        # be the pages that the device reads.
        pages.madvise(mmap.MADV_DONTFORK)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._helpers = HelperThreads(min(os.cpu_count() or 1, _MAX_POPULATING))

    def allocate(self, begin: int, num_bytes: int) -> None:
        address, end = self.memory.data_ptr(), begin + num_bytes
        parts = [
            self._helpers.submit(_populate, address + part, min(_POPULATED_BYTES, end - part))
            for part in range(begin, end, _POPULATED_BYTES)
        ]
        for part in parts:
            part.result()

    def close(self) -> None:
        """End the helper threads; the memory is unmapped with the last tensor over it."""
        self._helpers.shutdown()


def _populate(address: int, num_bytes: int) -> None:
    """Make the system allocate the pages now. By ctypes, which lets other threads run meanwhile;
    `mmap.madvise` holds the interpreter's lock, and every stream would wait."""
    if _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE) == 0:
        return
    error = ctypes.get_errno()
    if error != errno.EINVAL:  # older systems cannot; pages are allocated when touched
        raise OSError(error, os.strerror(error))


@lru_cache(maxsize=1)
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
