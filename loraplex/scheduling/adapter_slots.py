"""Limit on the number of different adapters that run at a time, for engines with a fixed number of slots."""

from __future__ import annotations


class AdapterSlots:
    """The adapters of running requests, counted. `num_slots`: None for no limit."""

    def __init__(self, num_slots: int | None) -> None:
        self._num_slots = num_slots
        self._running: dict[str, int] = {}

    def has_room_for(self, adapter: str | None) -> bool:
        """Return whether a request on this adapter may run beside those that do."""
        if self._num_slots is None or adapter is None:
            return True
        return adapter in self._running or len(self._running) < self._num_slots

    def enter(self, adapter: str | None) -> None:
        if self._num_slots is not None and adapter is not None:
            self._running[adapter] = self._running.get(adapter, 0) + 1

    def leave(self, adapter: str | None) -> None:
        if self._num_slots is None or adapter is None:
            return
        self._running[adapter] -= 1
        if self._running[adapter] == 0:
            del self._running[adapter]
