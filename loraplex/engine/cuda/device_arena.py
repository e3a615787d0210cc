"""The device's memory for KV blocks and adapters: one tensor of bytes, with views of its contents.

`scheduling.arena` decides what lies where. One page that it does not know of is at the end: padding rows of
graphs write there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch

from loraplex.core.errors import CapacityError
from loraplex.core.shape import ModelShape
from loraplex.model.decoder import KVCache
from loraplex.scheduling.plan import Move

_STAGING_BYTES: Final = 32 << 20


def page_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page: keys and values of one block of tokens in all layers."""
    return 2 * shape.num_layers * shape.kv_size * block_size * dtype.itemsize


class DeviceArena:
    """Memory that is allocated once, here: no step and no load can run out of it later."""

    def __init__(
        self, shape: ModelShape, *, num_pages: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.scratch_slot = num_pages * block_size
        self.page_bytes = page_bytes(shape, block_size, dtype)
        self.top = num_pages * self.page_bytes  # the end of what `scheduling.arena` knows of
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
        self.address = self._bytes.data_ptr()
        self._staging = torch.empty(
            min(_STAGING_BYTES, self._bytes.numel()), dtype=torch.uint8, device=device
        )

    def span(self, begin: int, num_bytes: int) -> torch.Tensor:
        assert 0 <= begin <= begin + num_bytes <= self._bytes.numel(), "outside of the arena"
        return self._bytes[begin : begin + num_bytes]

    def move(self, moves: Iterable[Move]) -> None:
        """Copy on the current stream, in this order."""
        for move in moves:
            if abs(move.target_byte - move.source_byte) >= move.num_bytes:
                source = self.span(move.source_byte, move.num_bytes)
                self.span(move.target_byte, move.num_bytes).copy_(source)
            else:
                self._move_overlapping(move)

    def _move_overlapping(self, move: Move) -> None:
        """Copy piece by piece through a staging buffer: up from the upper end, down from the lower end."""
        size = self._staging.numel()
        pieces = [(begin, min(begin + size, move.num_bytes)) for begin in range(0, move.num_bytes, size)]
        for begin, end in pieces if move.target_byte < move.source_byte else reversed(pieces):
            piece = self._staging[: end - begin]
            piece.copy_(self.span(move.source_byte + begin, end - begin))
            self.span(move.target_byte + begin, end - begin).copy_(piece)
