"""Which adapters are in memory: a byte budget, least recently used goes first, one in use never goes.

Pure bookkeeping. The engine executes what is decided here: it reads what `acquire` starts to load and
drops what `take_evictions` names.

    ABSENT --acquire--> LOADING --loaded--> RESIDENT --evicted--> ABSENT
                           `----failed----> ABSENT
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from loraplex.core.errors import CapacityError


class Tier(StrEnum):
    """Where an adapter's weights are, as shown to users."""

    DISK = "disk"
    LOADING = "loading"
    HOST = "host"


@dataclass(kw_only=True, slots=True)
class _Entry:
    num_bytes: int
    tier: Tier = Tier.DISK
    pins: int = 0
    in_flight: int = 0
    hits: int = 0
    loads: int = 0
    removing: bool = False


class Residency:
    """Bookkeeping of one memory tier.

    A version is *in flight* while any request names it, and *pinned* while a request counts on its
    weights being there (they are loading for it, or it runs). Pinned versions are never evicted;
    removed ones are forgotten when nothing is in flight any more.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # resident and unpinned, oldest use first
        self._evictions: list[str] = []
        self._removed: list[str] = []

    def __contains__(self, version: str) -> bool:
        entry = self._entries.get(version)
        return entry is not None and not entry.removing

    def add(self, version: str, num_bytes: int) -> None:
        """Make a version known. Raises CapacityError if it could never be resident."""
        if num_bytes > self.budget_bytes:
            raise CapacityError(
                f"the adapter needs {num_bytes:,} bytes, the budget for adapters is "
                f"{self.budget_bytes:,}; raise --host-adapter-memory"
            )
        entry = self._entries.setdefault(version, _Entry(num_bytes=num_bytes))
        if entry.removing:  # the removal is overtaken: whoever waits for it need not wait on
            entry.removing = False
            self._removed.append(version)

    def remove(self, version: str) -> None:
        """Forget a version as soon as nothing is in flight on it. Unknown versions are ignored."""
        entry = self._entries.get(version)
        if entry is None:
            self._removed.append(version)
            return
        entry.removing = True
        self._forget_if_drained(version, entry)

    def enter(self, version: str) -> None:
        """A request that names this version arrived."""
        self._entries[version].in_flight += 1

    def leave(self, version: str, *, pinned: bool) -> None:
        """A request that named this version ended."""
        entry = self._entries[version]
        if pinned:
            self._unpin(version, entry)
        entry.in_flight -= 1
        assert entry.in_flight >= entry.pins >= 0
        self._forget_if_drained(version, entry)

    def acquire(self, version: str) -> bool:
        """Pin a version for a request; starts a load if it is absent. False: no room now, try again later."""
        entry = self._entries[version]
        if entry.tier is Tier.DISK:
            if not self._make_room(entry.num_bytes):
                return False
            entry.tier = Tier.LOADING
            self.used_bytes += entry.num_bytes
        else:
            entry.hits += 1
            self._idle.pop(version, None)
        entry.pins += 1
        return True

    def tier(self, version: str) -> Tier:
        return self._entries[version].tier

    def loaded(self, version: str) -> None:
        """A load that `acquire` started is complete."""
        entry = self._entries[version]
        assert entry.tier is Tier.LOADING, f"{version} was not loading"
        entry.tier = Tier.HOST
        entry.loads += 1
        if entry.pins == 0:  # everyone who waited for it is gone
            self._idle[version] = None
            self._forget_if_drained(version, entry)

    def failed(self, version: str) -> None:
        """A load that `acquire` started came to nothing. Its requests still have to leave."""
        entry = self._entries[version]
        assert entry.tier is Tier.LOADING, f"{version} was not loading"
        entry.tier = Tier.DISK
        self.used_bytes -= entry.num_bytes
        self._forget_if_drained(version, entry)

    def take_evictions(self) -> list[str]:
        """Versions whose weights must be dropped now, since the last call."""
        evictions, self._evictions = self._evictions, []
        return evictions

    def take_removed(self) -> list[str]:
        """Versions whose removal was completed since the last call."""
        removed, self._removed = self._removed, []
        return removed

    @property
    def resident(self) -> set[str]:
        """Versions whose weights are in memory."""
        return {version for version, entry in self._entries.items() if entry.tier is Tier.HOST}

    def snapshot(self) -> list[tuple[str, Tier, int, int, int, int]]:
        """(version, tier, bytes, in flight, hits, loads) of every version that is known.

        A load counts when it is complete: one that failed has brought nothing into memory.
        """
        return [
            (version, entry.tier, entry.num_bytes, entry.in_flight, entry.hits, entry.loads)
            for version, entry in self._entries.items()
        ]

    def check_integrity(self, pins: dict[str, int], in_flight: dict[str, int]) -> None:
        """Assert that the books agree with the requests' own count of pins and with the budget."""
        held = sum(entry.num_bytes for entry in self._entries.values() if entry.tier is not Tier.DISK)
        assert held == self.used_bytes <= self.budget_bytes
        for version, entry in self._entries.items():
            assert entry.pins == pins.get(version, 0), f"{version}: {entry.pins} pins, held by {pins}"
            assert entry.in_flight == in_flight.get(version, 0)
            assert (version in self._idle) == (entry.tier is Tier.HOST and entry.pins == 0)
            assert not (entry.removing and entry.in_flight == 0 and entry.tier is not Tier.LOADING)

    def _unpin(self, version: str, entry: _Entry) -> None:
        entry.pins -= 1
        if entry.pins == 0 and entry.tier is Tier.HOST:
            self._idle[version] = None

    def _make_room(self, num_bytes: int) -> bool:
        """Evict idle versions, least recently used first; evicts nothing unless that makes enough room."""
        excess = self.used_bytes + num_bytes - self.budget_bytes
        if excess <= 0:
            return True
        if sum(self._entries[version].num_bytes for version in self._idle) < excess:
            return False
        while self.used_bytes + num_bytes > self.budget_bytes:
            self._drop(next(iter(self._idle)))
        return True

    def _drop(self, version: str) -> None:
        entry = self._entries[version]
        del self._idle[version]
        entry.tier = Tier.DISK
        self.used_bytes -= entry.num_bytes
        self._evictions.append(version)

    def _forget_if_drained(self, version: str, entry: _Entry) -> None:
        if not entry.removing or entry.in_flight > 0 or entry.tier is Tier.LOADING:
            return
        if entry.tier is Tier.HOST:
            self._drop(version)
        del self._entries[version]
        self._removed.append(version)
