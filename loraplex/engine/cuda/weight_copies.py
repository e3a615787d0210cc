"""Copies a checkpoint's weights to a device through pinned memory.

One thread that copies from a mapped file reaches a fraction of the speed of the bus. Here every thread reads
a chunk into pinned memory while the device fetches the one before. Files are read, not accessed through their
mapping: every page of it is a page fault, for which all threads of a process compete.
"""

from __future__ import annotations

import os
import threading
from typing import Final

import torch

from loraplex.core.errors import ModelError
from loraplex.engine.cuda.streams import Moment, SideStream
from loraplex.model.weights import StoredTensor

MAX_THREADS: Final = 8
_CHUNK_BYTES: Final = 8 << 20


class WeightCopies:
    """A function that returns a file's tensor on the device, in the given dtype. Many threads may call it at
    a time; each must have called `use_device`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._device = device
        self._dtype = dtype
        self._chunk_bytes = chunk_bytes
        self._of_thread = threading.local()

    def __call__(self, stored: StoredTensor) -> torch.Tensor:
        source = stored.values
        target = torch.empty(source.shape, dtype=self._dtype, device=self._device)
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = SideStream(self._device)
            self._of_thread.chunks = [_Chunk(self._chunk_bytes, self._device) for _ in range(2)]
        stream: SideStream = self._of_thread.stream
        chunks: list[_Chunk] = self._of_thread.chunks
        # Bytes can be read unchanged if the dtype stays the same.
        offset = stored.offset if source.dtype == self._dtype else None
        row_elements = source.shape[-1]
        source_rows, target_rows = source.view(-1, row_elements), target.view(-1, row_elements)
        row_bytes = row_elements * self._dtype.itemsize
        num_rows = self._chunk_bytes // row_bytes
        assert num_rows > 0
        for place, begin in enumerate(range(0, source_rows.shape[0], num_rows)):
            rows = slice(begin, begin + num_rows)
            chunk = chunks[place % len(chunks)]
            staged = chunk.staged(source_rows[rows].shape, self._dtype)
            if offset is None:
                staged.copy_(source_rows[rows])
            else:
                _read_exactly(stored.file, offset + begin * row_bytes, staged)
            with stream.entered():
                target_rows[rows].copy_(staged, non_blocking=True)
            chunk.fetched = stream.moment()
        for chunk in chunks:
            chunk.fetched.wait()
        return target


class _Chunk:
    """Pinned memory, and the moment at which the device has fetched its contents."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.fetched = Moment(device)

    def staged(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Wait until it is free, and return its beginning as a tensor to write to."""
        self.fetched.wait()
        return self._bytes[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _read_exactly(file: int, offset: int, target: torch.Tensor) -> None:
    left = target.view(torch.uint8).numpy().reshape(-1).data
    while left:
        num_bytes = os.preadv(file, [left], offset)
        if num_bytes == 0:
            raise ModelError("a file of the model was cut short while it was read; download it again")
        offset += num_bytes
        left = left[num_bytes:]
