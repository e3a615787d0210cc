"""How many different adapters may run at a time, where an engine has a fixed number of slots for them."""

from __future__ import annotations


class AdapterSlots:
    """`num_slots`: None if there are as many as anybody wants."""

    def __init__(self, num_slots: int | None) -> None:
        self._num_slots = num_slots
        self._running: dict[str, int] = {}

    def has_room_for(self, adapter: str | None) -> bool:
        """Whether a request on it may run beside those that do."""
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
