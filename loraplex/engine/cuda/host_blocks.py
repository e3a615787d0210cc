"""Adapters' blocks in host memory: read there from their folders, and copied to the device from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_reads import ReadSlab
from loraplex.engine.cuda.adapter_block import adapter_block
from loraplex.engine.cuda.bus import Stretch
from loraplex.engine.cuda.host_memory import HostMemory


class HostBlocks(Protocol):
    """Blocks at places in host memory, which are decided elsewhere (`scheduling.adapter_table`)."""

    def read(self, spec: AdapterSpec, place: int) -> None:
        """Fill the block at a byte of host memory; called on a reader's thread."""
        ...

    def parts(self, spec: AdapterSpec, place: int, begin: int, end: int) -> list[Stretch]:
        """Return bytes [begin, end) of the block that was read to a place, in pieces to copy one by one."""
        ...

    def passing(self, spec: AdapterSpec) -> torch.Tensor:
        """Read an adapter that is not kept into a block of its own; called on a reader's thread."""
        ...

    def prepare(self) -> bool:
        """Do a part of the work ahead of later reads; return False if nothing is left to do."""
        ...

    def close(self, *, frees_memory: bool = True) -> None:
        """Free everything, after the last copy; all but the memory if not `frees_memory`, because a read that
        hangs may still write to it."""
        ...


class HostPool:
    """Blocks read from the adapters' files, or copied from other replicas."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        memory: HostMemory,
        read: ReadSlab,
        on_close: Callable[[], None] = lambda: None,
        *,
        keep: ReadSlab | None = None,
    ) -> None:
        """`keep`: used instead of `read` for blocks that stay in host memory. `on_close`: called by
        `close`."""
        self._shape = shape
        self._dtype = dtype
        self._memory = memory
        self._read = read
        self._keep = keep or read
        self._on_close = on_close

    def read(self, spec: AdapterSpec, place: int) -> None:
        self._fill(spec, self._keep, lambda num_bytes: self._memory.take(place, place + num_bytes))

    def parts(self, spec: AdapterSpec, place: int, begin: int, end: int) -> list[Stretch]:
        pieces = self._memory.pieces(place + begin, place + end)
        return [Stretch(self._memory.address + low, high - low) for low, high in pieces]

    def passing(self, spec: AdapterSpec) -> torch.Tensor:
        return self._fill(spec, self._read, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))

    def prepare(self) -> bool:
        return self._memory.pin_ahead()

    def close(self, *, frees_memory: bool = True) -> None:
        try:
            if frees_memory:
                self._memory.close()
            else:
                self._memory.leave()
        finally:
            self._on_close()

    def _fill(self, spec: AdapterSpec, read: ReadSlab, memory: Callable[[int], torch.Tensor]) -> torch.Tensor:
        return adapter_block(spec, self._shape, self._dtype, read, memory)
