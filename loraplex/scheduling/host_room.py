"""Host memory for adapters that a device loads from: one stretch, with a contiguous piece for each
adapter."""

from __future__ import annotations

from typing import Final

from loraplex.core.errors import CapacityError
from loraplex.scheduling.places import Places
from loraplex.scheduling.room import Evict
from loraplex.scheduling.victims import NO_BLOCKS, CachedBlock, IdleAdapters, next_victim

_UNIT_BYTES: Final = 4096
"""A page of host memory: copies to the device begin at page boundaries."""


class HostRoom:
    """A `Room` that is filled from the top downwards, so that memory not needed yet is never touched."""

    on_device = False

    def __init__(self, budget_bytes: int) -> None:
        num_units = budget_bytes // _UNIT_BYTES
        self.budget_bytes = num_units * _UNIT_BYTES
        self.used_bytes = 0
        self._places = Places(num_units)
        self._places.extend(num_units)

    def place_of(self, version: str) -> int:
        """Return the first byte of a version's copy."""
        return self._places.span_of(version)[0] * _UNIT_BYTES

    def taken_by(self, num_bytes: int) -> int:
        taken_bytes = -(-num_bytes // _UNIT_BYTES) * _UNIT_BYTES
        if taken_bytes > self.budget_bytes:
            raise CapacityError(
                f"the adapter needs {num_bytes:,} bytes, the budget for adapters in host memory is "
                f"{self.budget_bytes:,}; raise --host-adapter-memory"
            )
        return taken_bytes

    def take(
        self, version: str, taken_bytes: int, idle: IdleAdapters, evict: Evict, spare_blocks: int
    ) -> bool:
        size = taken_bytes // _UNIT_BYTES
        if size > self._places.gap and size > self._places.largest_hole(without=idle.versions):
            return False  # versions that are being read or copied are in the way, but not for long
        while not self._places.put(version, size):
            # Evict also where enough is free, but not in one piece.
            short = max(size - self._places.num_free, 1) * _UNIT_BYTES
            victim = next_victim(idle, NO_BLOCKS, short=short)
            assert victim is not None
            assert not isinstance(victim, CachedBlock)
            evict(victim)
        self.used_bytes += taken_bytes
        return True

    def settle(self, version: str) -> None:
        """Do nothing: adapters are never shifted here."""

    def give_back(self, version: str, taken_bytes: int, last_use: int) -> None:
        self._places.remove(version)
        self.used_bytes -= taken_bytes

    def check_integrity(self, taken_bytes: dict[str, int]) -> None:
        """Assert that exactly these versions have places, of these sizes."""
        self._places.check_integrity({name: size // _UNIT_BYTES for name, size in taken_bytes.items()})
