"""Copies a checkpoint's weights to a device through pinned memory.

Copied straight from a mapped file, by one thread, they come at a fraction of the speed of the bus. Here every
thread reads a chunk into pinned memory while the device fetches the one before. Files are read and not looked
at through their mapping: every page of that is a fault, which all threads of a process get in each other's
way with.
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
    """Called with a tensor of a file, returns it on the device and in the type given; by many threads at
    a time, each of which must be about that device already (`use_device`)."""

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
        # Bytes can be read as they are if the device has them in the same type.
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
    """Pinned memory, and when the device has fetched what is in it."""

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
