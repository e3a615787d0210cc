"""Room for adapters in the host's memory, on their way to a device: one stretch of it, a piece for each."""

from __future__ import annotations

from typing import Final

from loraplex.core.errors import CapacityError
from loraplex.scheduling.places import Places
from loraplex.scheduling.room import Evict
from loraplex.scheduling.victims import NO_BLOCKS, CachedBlock, IdleAdapters, next_victim

_UNIT_BYTES: Final = 4096
"""A page of the host's: what is copied from begins at one."""


class HostRoom:
    """A `Room`. Taken from the top downwards, so that memory nobody needed yet is left alone."""

    on_device = False

    def __init__(self, budget_bytes: int) -> None:
        num_units = budget_bytes // _UNIT_BYTES
        self.budget_bytes = num_units * _UNIT_BYTES
        self.used_bytes = 0
        self._places = Places(num_units)
        self._places.extend(num_units)

    def place_of(self, version: str) -> int:
        """Its first byte."""
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
            return False  # others that are being read or copied are in the way, not for long
        while not self._places.put(version, size):
            # Also where enough is free, but in no one piece.
            short = max(size - self._places.num_free, 1) * _UNIT_BYTES
            victim = next_victim(idle, NO_BLOCKS, short=short)
            assert victim is not None
            assert not isinstance(victim, CachedBlock)
            evict(victim)
        self.used_bytes += taken_bytes
        return True

    def settle(self, version: str) -> None:
        """Nothing is ever shifted here."""

    def give_back(self, version: str, taken_bytes: int, last_use: int) -> None:
        self._places.remove(version)
        self.used_bytes -= taken_bytes

    def check_integrity(self, taken_bytes: dict[str, int]) -> None:
        """Assert that exactly these versions have places, of these sizes."""
        self._places.check_integrity({name: size // _UNIT_BYTES for name, size in taken_bytes.items()})
