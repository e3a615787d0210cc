"""Memory for adapters, as the adapter table sees it: how much there is, and who has how much of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from loraplex.core.errors import CapacityError
from loraplex.scheduling.victims import NO_BLOCKS, CachedBlock, IdleAdapter, IdleAdapters, next_victim

Evict = Callable[[IdleAdapter], None]
"""Ends with a call of `Room.give_back`."""


class Room(Protocol):
    """Memory for adapters. `on_device`: a device's; otherwise the host's."""

    on_device: bool

    @property
    def used_bytes(self) -> int: ...

    @property
    def budget_bytes(self) -> int:
        """What adapters have at the most."""
        ...

    def taken_by(self, num_bytes: int) -> int:
        """What an adapter of this size takes. Raises CapacityError if there could never be room for it."""
        ...

    def take(
        self, version: str, taken_bytes: int, idle: IdleAdapters, evict: Evict, spare_blocks: int
    ) -> bool:
        """Memory for a version that is about to load; False if that cannot be now. Nothing is evicted in
        vain, unless another load is in the way.

        `idle`: those that may be evicted for it. `spare_blocks`: KV blocks that must be to be had afterwards.
        """
        ...

    def settle(self, version: str) -> None:
        """Its load is complete."""
        ...

    def give_back(self, version: str, taken_bytes: int, last_use: int) -> None: ...


class ByteBudget:
    """Room that is counted and not shared: each adapter is given memory of its own."""

    on_device = False

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0

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
        while (victim := next_victim(idle, NO_BLOCKS, short=self._short_of(taken_bytes))) is not None:
            assert not isinstance(victim, CachedBlock)
            evict(victim)
        self.used_bytes += taken_bytes
        return True

    def settle(self, version: str) -> None:
        pass

    def give_back(self, version: str, taken_bytes: int, last_use: int) -> None:
        self.used_bytes -= taken_bytes

    def _short_of(self, num_bytes: int) -> int:
        return self.used_bytes + num_bytes - self.budget_bytes
