"""Adapters kept in the host's memory between the disk and the device, within a budget.

One piece of pinned memory, taken once: pinning is slow, and only from pinned memory does a copy run beside
the steps, at the full speed of the bus. Used on the loader's thread alone.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from loraplex.adapters.places import Places
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_loader import read_slab
from loraplex.engine.cuda.adapter_store import ReadSlab, block_bytes, write_block

_UNIT_BYTES = 4096


class HostPool:
    """Blocks by version, those used least recently dropped first. A budget of 0 keeps none."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        *,
        budget_bytes: int,
        pinned: bool,
        read: ReadSlab = read_slab,
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._pinned = pinned
        self._read = read
        num_units = budget_bytes // _UNIT_BYTES
        self._memory = torch.empty(num_units * _UNIT_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._places = Places(num_units)
        self._places.extend(num_units)
        self._versions: OrderedDict[str, None] = OrderedDict()  # least recently used first

    @property
    def versions(self) -> frozenset[str]:
        """Of the adapters kept. May be asked for on any thread."""
        return frozenset(self._versions.copy())

    def __call__(self, spec: AdapterSpec) -> torch.Tensor:
        """The adapter's block; valid until the next call."""
        num_bytes = block_bytes(spec, self._shape, self._dtype)
        if spec.version in self._versions:
            self._versions.move_to_end(spec.version)
            return self._block(spec.version, num_bytes)
        if not self._make_room(spec.version, num_bytes):
            block = torch.empty(num_bytes, dtype=torch.uint8)
            write_block(block, spec, self._shape, self._dtype, self._read)
            return block
        try:
            block = self._block(spec.version, num_bytes)
            write_block(block, spec, self._shape, self._dtype, self._read)
        except BaseException:
            self._places.remove(spec.version)
            raise
        self._versions[spec.version] = None
        return block

    def _make_room(self, version: str, num_bytes: int) -> bool:
        size = -(-num_bytes // _UNIT_BYTES)
        if size * _UNIT_BYTES > self._memory.numel():
            return False
        while not self._places.put(version, size):
            oldest, _ = self._versions.popitem(last=False)
            self._places.remove(oldest)
        return True

    def _block(self, version: str, num_bytes: int) -> torch.Tensor:
        start, _ = self._places.span_of(version)
        return self._memory[start * _UNIT_BYTES : start * _UNIT_BYTES + num_bytes]
