"""The tier between disk and device: which adapters are in the host's memory, which are read into it next.

    DISK --fetch--> LOADING --arrived--> HOST --hold--> held while a device copies it --release--> HOST
                       `----failed----> DISK         least recently held goes first when room is short

A read is begun only when one of the few that may run at a time is free, so what is read next is always what
the first of those who wait needs. A read that is overdue is not one of these few. It keeps its memory until
it ends; what finds no room beside such memory is loaded from disk without a stay in the host's memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import KeysView, Set
from typing import Final

from loraplex.adapters.host_room import HostRoom
from loraplex.adapters.residency import Residency
from loraplex.adapters.room import Tier
from loraplex.scheduling.plan import AdapterRead

_MAX_EVICTED: Final = 10_000
"""Versions that are remembered to have made way."""
_MAX_READS: Final = 2
"""At a time: while one is all but done, the next has begun."""


class Staging:
    """Adapters too large for the host's budget, or for what overdue reads leave of it, are not staged: a
    device loads them from disk. `ahead`: versions to be read before anybody asks for them."""

    def __init__(self, budget_bytes: int) -> None:
        self._room = HostRoom(budget_bytes)
        self._residency = Residency(self._room)
        self._unstaged: set[str] = set()  # too large, until they are added again
        self._held: Counter[str] = Counter()
        self._reads: list[str] = []
        self._evicted: list[str] = []
        # Ordered and hashed, as thousands may be.
        self.ahead: OrderedDict[str, None] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return self._room.used_bytes

    @property
    def budget_bytes(self) -> int:
        return self._room.budget_bytes

    @property
    def versions(self) -> Set[str]:
        """Those that are all there."""
        return self._residency.resident

    def add(self, version: str, num_bytes: int) -> None:
        if num_bytes <= self._room.budget_bytes:
            self._unstaged.discard(version)
            self._residency.add(version, num_bytes)
        else:
            self._unstaged.add(version)

    def remove(self, version: str) -> None:
        """Forget it as soon as nobody reads or copies it."""
        self._residency.remove(version)
        self._unstaged.discard(version)
        self._tidy()

    def stages(self, version: str) -> bool:
        return version in self._residency

    def is_there(self, version: str) -> bool:
        """Tell whether a device can load it now."""
        return not self.stages(version) or self._residency.is_resident(version)

    def fetch(self, version: str) -> bool:
        """Begin to read a version that is not there, when it is its turn. False if there is no room for it
        just now: nobody behind it may take what it waits for."""
        if self._residency.tier(version) is not Tier.DISK or self._residency.num_loading >= _MAX_READS:
            return True
        if self._begin(version, self._residency.bring_in(version)):
            return True
        if not self._residency.waits_for_overdue_only:
            return False
        self._residency.remove(version)
        self._unstaged.add(version)
        self._tidy()
        return True

    def overdue(self, version: str) -> bool:
        """Let others be read while this read does not end. Return False if it is not being read, or if this
        is known."""
        return self._residency.overdue(version)

    def must_read(self, version: str) -> bool:
        """Tell whether a device could not load it before a read has ended."""
        return self.stages(version) and not self._residency.is_resident(version)

    def holds_up_all(self, versions: KeysView[str]) -> bool:
        """Return whether each of these versions is being read, or has its turn when a read has ended."""
        if self._residency.num_loading < _MAX_READS:
            return versions <= self._residency.loading
        # Both sides are hashed, so that the shorter one is gone through.
        return versions.isdisjoint(self._residency.resident) and versions.isdisjoint(self._unstaged)

    def stage_ahead(self, version: str) -> None:
        self.ahead.setdefault(version)

    def fetch_ahead(self) -> None:
        """Begin reads that nobody waits for, where a reader and memory are free."""
        while self.ahead and self._residency.num_loading < _MAX_READS:
            version, _ = self.ahead.popitem(last=False)
            if self.stages(version) and self._residency.tier(version) is Tier.DISK:
                self._begin(version, self._residency.load_ahead(version))

    def _begin(self, version: str, begun: bool) -> bool:
        if begun:
            self._reads.append(version)
        self._tidy()
        return begun

    def take_reads(self) -> tuple[AdapterRead, ...]:
        """Return the reads that were begun since the last call."""
        reads, self._reads = self._reads, []
        return tuple(AdapterRead(version=version, place=self._room.place_of(version)) for version in reads)

    def arrived(self, version: str) -> None:
        self._residency.loaded(version)
        self._tidy()

    def failed(self, version: str) -> None:
        self._residency.failed(version)
        self._tidy()

    def hold(self, version: str) -> int | None:
        """Keep it until `release`, and return where a device finds it; None if it is not staged."""
        if not self.stages(version):
            return None
        self._residency.enter(version)
        acquired = self._residency.acquire(version)
        assert acquired, f"{version} is held before it is there"
        self._held[version] += 1
        return self._room.place_of(version)

    def release(self, version: str) -> None:
        if self._held[version] > 0:
            self._held[version] -= 1
            self._residency.leave(version, pinned=True)
            self._tidy()

    def check_integrity(self) -> None:
        self._residency.check_integrity(pins=+self._held, in_flight=+self._held)
        self._room.check_integrity(
            {row.version: row.num_bytes for row in self._residency.snapshot() if row.tier != Tier.DISK}
        )

    def _tidy(self) -> None:
        # Whoever executes the reads keeps no books: what left is overwritten by what comes.
        self._evicted += self._residency.take_evictions()
        del self._evicted[:-_MAX_EVICTED]
        self._residency.take_removed()

    def take_evictions(self) -> list[str]:
        """Return the versions that made way for others since the last call; the latest of them if nobody has
        asked for long."""
        evicted, self._evicted = self._evicted, []
        return evicted
