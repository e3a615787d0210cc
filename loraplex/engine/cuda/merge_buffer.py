"""The device's memory for merged weights: the top of the arena, by `adapters.merged_layout`.

Its addresses are known from the start, so graphs can be captured over it at any time; `scheduling.arena`
decides when it holds merged weights, and when adapters and KV blocks.
"""

from __future__ import annotations

from collections.abc import Set

import torch

from loraplex.adapters.merged_layout import distance_below_top, group_size, layout_bytes
from loraplex.core.modules import GROUPS
from loraplex.core.shape import ModelShape
from loraplex.engine.cuda.device_arena import DeviceArena


class MergeBuffer:
    """Places of the merged weights of every group of linears in every layer."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, arena: DeviceArena) -> None:
        self._shape = shape
        self._dtype = dtype
        self._arena = arena

    @property
    def why_not_merged(self) -> str | None:
        """The reason why no adapter can be merged, in words for users; None if some can."""
        if any(self.num_bytes({group}) is not None for group in GROUPS):
            return None
        least = layout_bytes({next(iter(GROUPS))}, self._shape, self._dtype.itemsize)
        return (
            f"merged weights take at least {least:,} bytes, the device's memory for adapters and KV cache "
            f"has {self._arena.top:,}; raise --memory-fraction"
        )

    def num_bytes(self, groups: Set[str]) -> int | None:
        """Return the bytes from the beginning of these groups' weights to the top; None if the arena has too
        few beside one page, which some request needs."""
        num_bytes = layout_bytes(groups, self._shape, self._dtype.itemsize)
        return num_bytes if num_bytes <= self._arena.top - self._arena.page_bytes else None

    def begin(self, groups: Set[str]) -> int:
        """Return the byte of the arena where these groups' weights begin."""
        return self._arena.top - layout_bytes(groups, self._shape, self._dtype.itemsize)

    def weight(self, layer: int, group: str) -> torch.Tensor:
        """Return the memory (out, in) of a group's weight in a layer."""
        size = group_size(group, self._shape)
        element_bytes = self._dtype.itemsize
        begin = self._arena.top - distance_below_top(layer, group, self._shape, element_bytes)
        return self._arena.span(begin, size[0] * size[1] * element_bytes).view(self._dtype).view(size)
