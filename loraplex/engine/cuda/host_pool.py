"""Adapters kept in the host's memory between the disk and the device, within a budget.

The memory is pinned, as only from there does a copy run beside the steps, at the full speed of the bus.
Pinning is slow, so it is taken by the shelf, when the first adapter needs it, and kept. Used on the loader's
thread alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import torch

from loraplex.adapters.places import Places
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_loader import read_slab
from loraplex.engine.cuda.adapter_store import ReadSlab, block_bytes, write_block
from loraplex.engine.executor import HostTier

logger = logging.getLogger(__name__)

_UNIT_BYTES: Final = 4096
_SHELF_BYTES: Final = 512 << 20


class _Shelf:
    """A piece of memory with some adapters' blocks in it. One that is pinned must be unpinned at the end."""

    def __init__(self, num_units: int, pinned: bool) -> None:
        self.num_units = num_units
        self.memory = torch.empty(num_units * _UNIT_BYTES, dtype=torch.uint8)
        self._pinned = pinned
        if pinned:  # not by torch's allocator, which would round the size up to a power of two
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(runtime.cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0))
            if error != 0:
                logger.warning("host memory cannot be pinned (CUDA error %d): adapters load slower", error)
                self._pinned = False
        self.places = Places(num_units)
        self.places.extend(num_units)

    def block(self, version: str, num_bytes: int) -> torch.Tensor:
        start, _ = self.places.span_of(version)
        return self.memory[start * _UNIT_BYTES : start * _UNIT_BYTES + num_bytes]

    def unpin(self) -> None:
        if self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostUnregister(self.memory.data_ptr())))


class HostPool:
    """Blocks by version, those used least recently dropped first."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        *,
        budget_bytes: int,
        pinned: bool,
        read: ReadSlab = read_slab,
        shelf_bytes: int = _SHELF_BYTES,
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._pinned = pinned
        self._read = read
        self._shelf_units = shelf_bytes // _UNIT_BYTES
        self._budget_units = self._unused_units = budget_bytes // _UNIT_BYTES
        self._shelves: list[_Shelf] = []
        # Least recently used first.
        self._kept: OrderedDict[str, tuple[_Shelf, torch.Tensor]] = OrderedDict()

    def tier(self) -> HostTier:
        """May be asked for on any thread."""
        free_units = sum(shelf.places.num_free for shelf in self._shelves) + self._unused_units
        return HostTier(
            versions=frozenset(self._kept.copy()),
            used_bytes=(self._budget_units - free_units) * _UNIT_BYTES,
            budget_bytes=self._budget_units * _UNIT_BYTES,
        )

    def __call__(self, spec: AdapterSpec) -> torch.Tensor:
        """The adapter's block; valid until the next call."""
        version = spec.version
        if version in self._kept:
            self._kept.move_to_end(version)
            return self._kept[version][1]
        num_bytes = block_bytes(spec, self._shape, self._dtype)
        shelf = self._find_room(version, -(-num_bytes // _UNIT_BYTES))
        block = (
            torch.empty(num_bytes, dtype=torch.uint8) if shelf is None else shelf.block(version, num_bytes)
        )
        try:
            write_block(block, spec, self._shape, self._dtype, self._read)
        except BaseException:
            if shelf is not None:
                shelf.places.remove(version)
            raise
        if shelf is not None:
            self._kept[version] = shelf, block
        return block

    def close(self) -> None:
        """Give all memory back; after the last load."""
        for shelf in self._shelves:
            shelf.unpin()
        self._shelves.clear()
        self._kept.clear()

    def _find_room(self, version: str, size: int) -> _Shelf | None:
        """A shelf with a place for the version; None if it is larger than any shelf can be."""
        for shelf in self._candidates(size):
            if shelf.places.put(version, size):
                return shelf
        return None

    def _candidates(self, size: int) -> Iterator[_Shelf]:
        """Shelves that may have room: those there are, a new one, and those that lose an adapter."""
        yield from self._shelves
        if size <= self._unused_units:
            num_units = min(max(size, self._shelf_units), self._unused_units)
            shelf = _Shelf(num_units, self._pinned)
            self._unused_units -= num_units
            self._shelves.append(shelf)
            yield shelf
        if size > max((shelf.num_units for shelf in self._shelves), default=0):
            return  # no number of others that left would make room
        while self._kept:
            oldest, (shelf, _) = self._kept.popitem(last=False)
            shelf.places.remove(oldest)
            yield shelf
