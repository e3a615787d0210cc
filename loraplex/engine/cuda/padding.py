"""Adapters padded to the largest rank of their batch, as engines do that keep them in slots of one size.

For comparison only. An adapter is kept in several copies, one for every power of two from its own rank up to
a limit, filled up with zeros; a batch reads from all its adapters the copies for its largest rank. So a batch
reads as much as with padding, by the same kernels that otherwise read only an adapter's own rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import torch

from loraplex.adapters.slab import ModuleSlot, SlabLayout, slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import CapacityError
from loraplex.core.shape import ModelShape
from loraplex.engine.cuda.adapter_block import block_bytes, table_bytes, write_table
from loraplex.engine.cuda.bus import Stretch
from loraplex.engine.cuda.host_blocks import HostBlocks
from loraplex.kernels.lora import padded_rank

_ALIGNMENT: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """The layout of padded adapters. `max_rank`: the largest rank an adapter may have, a power of two."""

    shape: ModelShape
    dtype: torch.dtype
    max_rank: int

    def offsets(self, spec: AdapterSpec) -> dict[int, int]:
        """Return rank -> first byte of the copy padded to it, in an adapter's block."""
        offsets, cursor = {}, 0
        for rank, copy in self._copies(spec):
            offsets[rank] = cursor
            cursor += -(-self._block_bytes(copy) // _ALIGNMENT) * _ALIGNMENT
        return offsets

    def num_bytes(self, spec: AdapterSpec) -> int:
        """Return the bytes of all copies. Raises CapacityError for an adapter above the limit."""
        if spec.max_rank > self.max_rank:
            raise CapacityError(f"the adapter has rank {spec.max_rank}, ranks are padded to {self.max_rank}")
        last = max(self.offsets(spec).items())
        return last[1] + self._block_bytes(_with_rank(spec, last[0]))

    def block(self, spec: AdapterSpec, plain: torch.Tensor) -> torch.Tensor:
        """Return all copies of an adapter, made from its block without padding."""
        block = torch.zeros(self.num_bytes(spec), dtype=torch.uint8)
        header, layout = table_bytes(self.shape), slab_layout(spec, self.shape)
        source = plain[header:].view(self.dtype)
        offsets = self.offsets(spec)
        for rank, copy in self._copies(spec):
            copied = slab_layout(copy, self.shape)
            part = block[offsets[rank] : offsets[rank] + block_bytes(copied, self.shape, self.dtype)]
            write_table(part, copied, self.shape, self.dtype)
            _copy_slab(source, layout, part[header:].view(self.dtype), copied)
        return block

    def _block_bytes(self, spec: AdapterSpec) -> int:
        return block_bytes(slab_layout(spec, self.shape), self.shape, self.dtype)

    def _copies(self, spec: AdapterSpec) -> Iterator[tuple[int, AdapterSpec]]:
        rank = padded_rank(spec.max_rank)
        while rank <= self.max_rank:
            yield rank, _with_rank(spec, rank)
            rank *= 2


class PaddedBlocks:
    """`HostBlocks` of padded adapters, made once and kept, in memory of their own."""

    def __init__(self, padding: Padding, plain: HostBlocks, *, pinned: bool) -> None:
        self._padding = padding
        self._plain = plain
        self._pinned = pinned
        self._blocks: dict[str, torch.Tensor] = {}

    def read(self, spec: AdapterSpec, place: int) -> None:
        if spec.version not in self._blocks:
            block = self.passing(spec)
            self._blocks[spec.version] = block.pin_memory() if self._pinned else block

    def parts(self, spec: AdapterSpec, place: int, begin: int, end: int) -> list[Stretch]:
        return [Stretch(self._blocks[spec.version].data_ptr() + begin, end - begin)]

    def passing(self, spec: AdapterSpec) -> torch.Tensor:
        return self._padding.block(spec, self._plain.passing(spec))

    def prepare(self) -> bool:
        return False

    def close(self, *, frees_memory: bool = True) -> None:
        self._blocks.clear()
        self._plain.close(frees_memory=frees_memory)


def _with_rank(spec: AdapterSpec, rank: int) -> AdapterSpec:
    return replace(spec, modules=tuple(replace(lora, rank=rank) for lora in spec.modules))


def _copy_slab(
    source: torch.Tensor, source_layout: SlabLayout, target: torch.Tensor, target_layout: SlabLayout
) -> None:
    """Copy an adapter's rows to the beginning of the padded one's rows."""
    for here, there in zip(_slots(source_layout), _slots(target_layout), strict=True):
        rank = here.lora.rank
        for size, start, new_start in (
            (rank * here.in_features, here.a_start, there.a_start),
            (rank * here.out_features, here.b_start, there.b_start),
        ):
            target[new_start : new_start + size] = source[start : start + size]


def _slots(layout: SlabLayout) -> Iterator[ModuleSlot]:
    return chain.from_iterable(slots for groups in layout.layers for slots in groups.values())
