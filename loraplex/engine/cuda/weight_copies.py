"""Copies a checkpoint's weights to a device through pinned memory.

Copied straight from a mapped file, by one thread, they come at a fraction of the speed of the bus. Here every
thread copies a chunk to pinned memory while the device fetches the one before.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
import torch

from loraplex.engine.cuda.streams import Moment, SideStream

MAX_THREADS: Final = 8
_CHUNK_BYTES: Final = 4 << 20


class WeightCopies:
    """Called with a tensor in host memory, returns it on the device and in the type given; by many threads at
    a time, each of which must be about that device already (`use_device`)."""

    def __init__(self, device: torch.device, dtype: torch.dtype, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._device = device
        self._dtype = dtype
        self._chunk_bytes = chunk_bytes
        self._of_thread = threading.local()

    def __call__(self, source: torch.Tensor) -> torch.Tensor:
        target = torch.empty(source.shape, dtype=self._dtype, device=self._device)
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = SideStream(self._device)
            self._of_thread.chunks = [_Chunk(self._chunk_bytes, self._device) for _ in range(2)]
        stream: SideStream = self._of_thread.stream
        chunks: list[_Chunk] = self._of_thread.chunks
        row_elements = source.shape[-1]
        source_rows, target_rows = source.view(-1, row_elements), target.view(-1, row_elements)
        num_rows = self._chunk_bytes // (row_elements * self._dtype.itemsize)
        assert num_rows > 0
        for place, begin in enumerate(range(0, source_rows.shape[0], num_rows)):
            rows = slice(begin, begin + num_rows)
            chunk = chunks[place % len(chunks)]
            staged = chunk.fill(source_rows[rows], self._dtype)
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

    def fill(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Wait until it is free, and copy rows into it."""
        self.fetched.wait()
        staged = self._bytes[: rows.numel() * dtype.itemsize].view(dtype).view(rows.shape)
        if rows.dtype == dtype and rows.is_contiguous():
            # By numpy: torch would have every one of the threads start as many others.
            np.copyto(staged.view(torch.uint8).numpy(), rows.view(torch.uint8).numpy())
        else:
            staged.copy_(rows)
        return staged
