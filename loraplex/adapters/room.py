"""Memory for adapters, as `residency` sees it: how much there is, and what has to go for more of it."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Protocol

from loraplex.core.errors import CapacityError


class Tier(StrEnum):
    """Where an adapter's weights are, as shown to users."""

    DISK = "disk"
    LOADING = "loading"
    HOST = "host"
    DEVICE = "device"


class IdleAdapters(Protocol):
    """Those a room may have evicted to make space, the least recently used first."""

    @property
    def idle_bytes(self) -> int: ...

    @property
    def idle_versions(self) -> Collection[str]: ...

    @property
    def oldest_idle_use(self) -> int | None:
        """When the next one to go was last in use; None if none is idle."""
        ...

    def evict_oldest(self) -> None:
        """Calls `Room.give_back`."""
        ...


class Room(Protocol):
    """Memory for adapters."""

    resident_tier: Tier

    @property
    def used_bytes(self) -> int: ...

    @property
    def budget_bytes(self) -> int:
        """What adapters have at the most."""
        ...

    def taken_by(self, num_bytes: int) -> int:
        """What an adapter of this size takes. Raises CapacityError if there could never be room for it."""
        ...

    def take(self, version: str, taken_bytes: int, idle: IdleAdapters, spare_blocks: int) -> bool:
        """Memory for a version that is about to load; False if that cannot be now. Nothing is evicted in
        vain, unless another load is in the way.

        `spare_blocks`: KV blocks that must be to be had afterwards.
        """
        ...

    def settle(self, version: str) -> None:
        """Its load is complete."""
        ...

    def give_back(self, version: str, taken_bytes: int, last_use: int) -> None: ...


class ByteBudget:
    """Room that is counted and not shared: each adapter is given memory of its own."""

    resident_tier = Tier.HOST

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

    def take(self, version: str, taken_bytes: int, idle: IdleAdapters, spare_blocks: int) -> bool:
        if self.used_bytes + taken_bytes - self.budget_bytes > idle.idle_bytes:
            return False
        while self.used_bytes + taken_bytes > self.budget_bytes:
            idle.evict_oldest()
        self.used_bytes += taken_bytes
        return True

    def settle(self, version: str) -> None:
        pass

    def give_back(self, version: str, taken_bytes: int, last_use: int) -> None:
        self.used_bytes -= taken_bytes
