"""Anonymous memory that several processes share: it is freed with the last of them."""

from __future__ import annotations

import contextlib
import os

import torch

from loraplex.core.errors import CapacityError
from loraplex.engine.machine import available_bytes


class SharedBlock:
    """A block of bytes, zero at first. Other processes map it by its file descriptor `fd`."""

    def __init__(self, num_bytes: int, *, fd: int | None = None) -> None:
        """Allocate a block, or map another process's block if `fd` is given, which `close` then closes.

        Raises CapacityError if there is not enough memory.
        """
        assert num_bytes > 0
        self.num_bytes = num_bytes
        self._fd: int | None = _allocate(num_bytes) if fd is None else fd
        # Not by Python's mmap: that would keep a second descriptor, and unmap under tensors in use.
        path = f"/proc/self/fd/{self._fd}"
        try:
            self._memory: torch.Tensor | None = torch.from_file(path, True, num_bytes, dtype=torch.uint8)
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        assert self._fd is not None, "the block is closed"
        return self._fd

    @property
    def memory(self) -> torch.Tensor:
        """All bytes."""
        assert self._memory is not None, "the block is closed"
        return self._memory

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def close(self) -> None:
        """Close the descriptor; the memory is unmapped with the last tensor over it. Idempotent."""
        self._memory = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _allocate(num_bytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise CapacityError("CPU LoRA workers need anonymous shared memory, which only Linux has; use none")
    # The kernel would allocate until no process has memory left, so the request is checked first.
    if num_bytes > (available := available_bytes()):
        raise _exhausted(num_bytes, f"{available >> 20} MiB are free")
    fd = os.memfd_create("loraplex", os.MFD_CLOEXEC)
    try:
        # All pages now: if one were unavailable later, the process that touches it would be killed.
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise _exhausted(num_bytes, error.strerror or str(error)) from None
    return fd


def _exhausted(num_bytes: int, reason: str) -> CapacityError:
    return CapacityError(
        f"{num_bytes / (1 << 20):.0f} MiB of shared memory for CPU LoRA workers cannot be had ({reason}); "
        "free memory, keep fewer adapters in host memory, or start without CPU LoRA workers"
    )
