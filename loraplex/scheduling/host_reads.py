"""Decides which adapters are read from disk into host memory next, before a device can load them.

At most two reads run at a time, and one begins only when a reader is free, so the next read always serves the
first waiting request that needs one. An overdue read does not count towards that limit. It keeps its memory
until it ends; a version that finds no room beside such memory is loaded straight from disk instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView
from typing import Final

from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.plan import AdapterRead

_MAX_READS: Final = 2
"""Reads that run at a time: the second one starts before the first has finished."""


class HostReads:
    """The queue of reads; the adapter table records where versions are. `ahead`: versions to read before any
    request asks for them. Without a host tier there is nothing to read."""

    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        self._begun: list[str] = []
        # Ordered, and hashed because there may be thousands.
        self.ahead: OrderedDict[str, None] = OrderedDict()

    def fetch(self, version: str) -> bool:
        """Begin to read an absent version if a reader is free. Return False if there is no room for it now:
        requests behind it must then not take the memory it waits for."""
        table = self._table
        if not table.can_read(version) or table.host.num_loading >= _MAX_READS:
            return True
        if table.begin_read(version):
            self._begun.append(version)
            return True
        if not table.host.waits_for_overdue_only:
            return False
        table.stop_staging(version)
        return True

    def stage_ahead(self, version: str) -> None:
        if self._table.host.room.budget_bytes > 0:
            self.ahead.setdefault(version)

    def fetch_ahead(self) -> None:
        """Begin reads that no request waits for, while a reader and memory are free."""
        while self.ahead and self._table.host.num_loading < _MAX_READS:
            version, _ = self.ahead.popitem(last=False)
            if self._table.can_read(version) and self._table.begin_read(version, ahead=True):
                self._begun.append(version)

    def holds_up_all(self, versions: KeysView[str]) -> bool:
        """Return whether each of these versions is being read, or is next when a read has ended."""
        table = self._table
        if table.host.num_loading < _MAX_READS:
            return versions <= table.host.loading
        # `isdisjoint` of two hashed collections iterates over the shorter one.
        return versions.isdisjoint(table.host.resident) and versions.isdisjoint(table.unstaged)

    def take(self) -> tuple[AdapterRead, ...]:
        """Return the reads that were begun since the last call."""
        if not self._begun:
            return ()
        begun, self._begun = self._begun, []
        return tuple(AdapterRead(version=version, place=self._place_of(version)) for version in begun)

    def _place_of(self, version: str) -> int:
        place = self._table.host_place(version)
        assert place is not None, f"{version} is not being read"
        return place
