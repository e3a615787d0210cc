"""Which adapters are read from disk to the host's memory next, on their way to a device.

A read is begun only when one of the few that may run at a time is free, so what is read next is always what
the first of those who wait needs. A read that is overdue is not one of these few. It keeps its memory until
it ends; what finds no room beside such memory is loaded from disk without a stay in the host's memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView
from typing import Final

from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.plan import AdapterRead

_MAX_READS: Final = 2
"""At a time: while one is all but done, the next has begun."""


class HostReads:
    """The order of reads; where versions are is known to the table. `ahead`: versions to be read before
    anybody asks for them. Without a host tier there is never anything to read."""

    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        self._begun: list[str] = []
        # Ordered and hashed, as thousands may be.
        self.ahead: OrderedDict[str, None] = OrderedDict()

    def fetch(self, version: str) -> bool:
        """Begin to read a version that is not there, when it is its turn. False if there is no room for it
        just now: nobody behind it may take what it waits for."""
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
        """Begin reads that nobody waits for, where a reader and memory are free."""
        while self.ahead and self._table.host.num_loading < _MAX_READS:
            version, _ = self.ahead.popitem(last=False)
            if self._table.can_read(version) and self._table.begin_read(version, ahead=True):
                self._begun.append(version)

    def holds_up_all(self, versions: KeysView[str]) -> bool:
        """Return whether each of these versions is being read, or has its turn when a read has ended."""
        table = self._table
        if table.host.num_loading < _MAX_READS:
            return versions <= table.host.loading
        # Both sides are hashed, so that the shorter one is gone through.
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
