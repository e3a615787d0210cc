"""Memory for adapters, as the adapter table sees it: its budget, and how much of it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from loraplex.core.errors import CapacityError
from loraplex.scheduling.victims import NO_BLOCKS, CachedBlock, IdleAdapter, IdleAdapters, next_victim

Evict = Callable[[IdleAdapter], None]
"""Evicts an adapter, which ends with a call of `Room.give_back`."""


class Room(Protocol):
    """Memory for adapters. `on_device`: whether it is a device's or the host's."""

    on_device: bool

    @property
    def used_bytes(self) -> int: ...

    @property
    def budget_bytes(self) -> int:
        """Most bytes that adapters may take."""
        ...

    def taken_by(self, num_bytes: int) -> int:
        """Return the bytes that an adapter of this size takes. Raises CapacityError if it could never fit."""
        ...

    def take(
        self, version: str, taken_bytes: int, idle: IdleAdapters, evict: Evict, spare_blocks: int
    ) -> bool:
        """Take memory for a version that is about to load. Return False if there is no room now; then nothing
        was evicted, unless another load is in the way.

        `idle`: adapters that may be evicted for it. `spare_blocks`: KV blocks that must still be available
        afterwards.
        """
        ...

    def settle(self, version: str) -> None:
        """Record that a version's load is complete."""
        ...

    def give_back(self, version: str, taken_bytes: int, last_use: int) -> None: ...


class ByteBudget:
    """A budget of bytes: each adapter has memory of its own."""

    on_device = False

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.merged_bytes = 0  # of merged weights

    def taken_by(self, num_bytes: int) -> int:
        if num_bytes > self.budget_bytes:
            raise CapacityError(
                f"the adapter needs {num_bytes:,} bytes, the budget for adapters is "
                f"{self.budget_bytes:,}; raise --host-adapter-memory"
            )
        return num_bytes

    def take(
        self, version: str, taken_bytes: int, idle: IdleAdapters, evict: Evict, spare_blocks: int
    ) -> bool:
        if self._short_of(taken_bytes) > idle.num_bytes:
            return False
        self._evict_for(taken_bytes, idle, evict)
        self.used_bytes += taken_bytes
        return True

    def take_merged(self, num_bytes: int, idle: IdleAdapters, evict: Evict) -> bool:
        """Have exactly so many bytes taken by merged weights. Return False, and change nothing, if idle
        adapters are too few to make room."""
        more_bytes = num_bytes - self.merged_bytes
        if self._short_of(more_bytes) > idle.num_bytes:
            return False
        self._evict_for(more_bytes, idle, evict)
        self.merged_bytes = num_bytes
        return True

    def settle(self, version: str) -> None:
        pass

    def give_back(self, version: str, taken_bytes: int, last_use: int) -> None:
        self.used_bytes -= taken_bytes

    def _evict_for(self, num_bytes: int, idle: IdleAdapters, evict: Evict) -> None:
        while (victim := next_victim(idle, NO_BLOCKS, short=self._short_of(num_bytes))) is not None:
            assert not isinstance(victim, CachedBlock)
            evict(victim)

    def _short_of(self, num_bytes: int) -> int:
        return self.used_bytes + self.merged_bytes + num_bytes - self.budget_bytes
