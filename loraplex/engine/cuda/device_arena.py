"""The device's memory for KV blocks and adapters: one tensor of bytes, seen as what lies in it.

`scheduling.arena` decides what lies where. One page more than it knows of stands at the end: padding rows of
graphs write there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from loraplex.core.errors import CapacityError
from loraplex.core.shape import ModelShape
from loraplex.model.decoder import KVCache
from loraplex.scheduling.plan import Move


def page_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block of tokens in all layers."""
    return 2 * shape.num_layers * shape.kv_size * block_size * dtype.itemsize


class DeviceArena:
    """All of it is allocated here, once: no step and no load can run out of memory later."""

    def __init__(
        self, shape: ModelShape, *, num_pages: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.scratch_slot = num_pages * block_size
        size = (num_pages + 1, shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
        try:
            pages = torch.zeros(size, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the device has no {math.prod(size) * dtype.itemsize:,} bytes in one piece for KV cache and "
                "adapters; lower --memory-fraction, or stop what else runs on it"
            ) from error
        self.caches = [
            KVCache(k=pages[:, layer, 0], v=pages[:, layer, 1]) for layer in range(shape.num_layers)
        ]
        self._bytes = pages.view(-1).view(torch.uint8)

    def span(self, begin: int, num_bytes: int) -> torch.Tensor:
        return self._bytes[begin : begin + num_bytes]

    def move(self, moves: Iterable[Move]) -> None:
        """Copy on the current stream, in this order."""
        for move in moves:
            # Where the places overlap, the upper end goes first, in pieces that do not.
            piece = min(abs(move.target_byte - move.source_byte), move.num_bytes)
            assert move.target_byte > move.source_byte or piece == move.num_bytes
            for end in range(move.num_bytes, 0, -piece):
                begin = max(end - piece, 0)
                source = self.span(move.source_byte + begin, end - begin)
                self.span(move.target_byte + begin, end - begin).copy_(source)
