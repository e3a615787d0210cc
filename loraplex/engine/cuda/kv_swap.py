"""Copies KV blocks between a device and pinned host memory, beside the steps.

    steps    |  P1  |  P2  |  P3  |  P4  |
    out             |--- blocks that P2 has written --->  reported, then used for something else
    in              |--- to blocks that P2 may still have used --->  reported, then read by a step

Each direction has a stream of its own, which waits for the steps launched so far; no step waits for a copy:
the scheduler uses a block again only after the end of its copy was reported, and a step's own numbers do not
need the copy engine (`small_copies`). All host memory is allocated and
pinned at the start, because pinning takes long, and nothing can run out of it later.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from loraplex.core.errors import EngineDeadError
from loraplex.engine.cuda import driver
from loraplex.engine.cuda.device_arena import DeviceArena
from loraplex.engine.cuda.host_memory import KV_SWAP, HostMemory
from loraplex.engine.cuda.streams import Moment, SideStream
from loraplex.engine.executor import SwapEvent
from loraplex.scheduling.plan import BlockCopy

_REPORTED_BYTES: Final = 64 << 20
"""Bytes of copies whose end is reported at once: their blocks are usable while others are being copied."""


class _InFlight(NamedTuple):
    """Copies that end together. `error`: why they were not made."""

    copies: tuple[BlockCopy, ...]
    done: Moment
    error: str | None


class KVSwap:
    """The host tier's memory, and the copies under way. Used by one thread."""

    def __init__(
        self, arena: DeviceArena, *, num_blocks: int, block_bytes: int, device: torch.device
    ) -> None:
        """Raises CapacityError if the host has not that much memory to pin."""
        self._arena = arena
        self._block_bytes = block_bytes
        self._memory = HostMemory(num_blocks * block_bytes, pinned=device.type == "cuda", use=KV_SWAP)
        try:
            self._memory.take(0, num_blocks * block_bytes)
        except BaseException:
            self._memory.close()
            raise
        self._out, self._in = SideStream(device), SideStream(device)
        self._outs: deque[_InFlight] = deque()
        self._ins: deque[_InFlight] = deque()

    @property
    def num_pending(self) -> int:
        """Number of ends of copies that `poll` has yet to report."""
        return len(self._outs) + len(self._ins)

    @property
    def has_ended(self) -> bool:
        """Return whether `poll` would report anything now."""
        return any(queue[0].done.passed for queue in (self._outs, self._ins) if queue)

    def start(self, outs: Sequence[BlockCopy], ins: Sequence[BlockCopy], after: Moment) -> None:
        """Begin copies, which run after a moment of the steps' stream."""
        for copies, stream, queue, copy in (
            (outs, self._out, self._outs, self._copy_out),
            (ins, self._in, self._ins, self._copy_in),
        ):
            if copies:
                stream.wait_for(after)
            for together in self._reported_together(copies):
                queue.append(self._launch(together, stream, copy))

    def poll(self) -> list[SwapEvent]:
        """Return the copies that have ended."""
        events: list[SwapEvent] = []
        for queue, out in ((self._outs, True), (self._ins, False)):
            while queue and queue[0].done.passed:
                ended = queue.popleft()
                events.append(SwapEvent(copies=ended.copies, out=out, error=ended.error))
        return events

    def close(self) -> None:
        """Wait for the copies, and free the memory."""
        try:
            self._out.synchronize()
            self._in.synchronize()
        finally:
            self._memory.close()

    def _reported_together(self, copies: Sequence[BlockCopy]) -> Iterator[tuple[BlockCopy, ...]]:
        size = max(_REPORTED_BYTES // self._block_bytes, 1)
        for first in range(0, len(copies), size):
            yield tuple(copies[first : first + size])

    def _launch(
        self,
        copies: tuple[BlockCopy, ...],
        stream: SideStream,
        copy: Callable[[int, int, int, SideStream], None],
    ) -> _InFlight:
        """Launch copies; an error fails these alone."""
        error = None
        try:
            for device_begin, host_begin, num_bytes in self._stretches(copies):
                copy(self._arena.address + device_begin, self._memory.address + host_begin, num_bytes, stream)
        except EngineDeadError as failure:
            error = str(failure)
        return _InFlight(copies, stream.moment(), error)

    def _stretches(self, copies: Sequence[BlockCopy]) -> Iterator[tuple[int, int, int]]:
        """Yield device byte, host byte and length of each copy to launch: blocks that are neighbours in both
        memories are copied at once."""
        for run in _runs(copies):
            begin, size = run[0].host_block * self._block_bytes, len(run) * self._block_bytes
            shift = run[0].device_block * self._block_bytes - begin
            for low, high in self._memory.pieces(begin, begin + size):
                yield low + shift, low, high - low

    def _copy_out(self, device: int, host: int, num_bytes: int, stream: SideStream) -> None:
        if stream.handle is None:
            ctypes.memmove(host, device, num_bytes)
        else:
            driver.copy_to_host(host, device, num_bytes, stream.handle)

    def _copy_in(self, device: int, host: int, num_bytes: int, stream: SideStream) -> None:
        if stream.handle is None:
            ctypes.memmove(device, host, num_bytes)
        else:
            driver.copy_to_device(device, host, num_bytes, stream.handle)


def _runs(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Yield copies of neighbouring blocks, in the order of the device's blocks."""
    run: list[BlockCopy] = []
    for copy in sorted(copies):
        if run and copy != (run[-1].device_block + 1, run[-1].host_block + 1):
            yield run
            run = []
        run.append(copy)
    if run:
        yield run
