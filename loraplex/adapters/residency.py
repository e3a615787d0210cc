"""Which adapters are in memory: least recently used goes first, one in use never goes.

Pure bookkeeping. The engine executes what is decided here: it reads what `acquire` starts to load and
drops what `take_evictions` names. How much memory there is, and where in it adapters lie, is known to a
`Room`: a budget of bytes, or the arena that they share with KV blocks.

    ABSENT --acquire--> LOADING --loaded--> RESIDENT --evicted--> ABSENT
                           `----failed----> ABSENT

A load that does not end may be declared *overdue*. It keeps its memory, which may still be written to, and is
accounted for in the usual way if it does end. Until then nobody waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass
from itertools import count
from typing import Final

from loraplex.adapters.room import IdleAdapters, Room, Tier
from loraplex.core.stats import AdapterStats


@dataclass(kw_only=True, slots=True)
class _Entry:
    num_bytes: int
    tier: Tier = Tier.DISK
    last_use: int = 0
    pins: int = 0
    in_flight: int = 0
    loads: int = 0
    kept: bool = False
    ahead: bool = False
    removing: bool = False


class _Nobody:
    """`IdleAdapters` of which there are none."""

    idle_bytes = 0
    idle_versions = ()
    oldest_idle_use = None

    def evict_oldest(self) -> None:
        raise AssertionError("there is nobody to evict")


_NOBODY: Final = _Nobody()


class Residency:
    """Bookkeeping of one memory tier.

    A version is *in flight* while any request names it, and *pinned* while a request counts on its
    weights being there (they are loading for it, or it runs). Pinned versions are never evicted, nor are
    those that are *kept*; removed ones are forgotten when nothing is in flight any more.
    """

    def __init__(self, room: Room, uses: Iterator[int] | None = None) -> None:
        """`uses`: numbers that order the ends of uses, here and wherever else memory is shared with."""
        self._room = room
        self._uses = uses or count()
        self.idle_bytes = 0
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # resident and unpinned, oldest use first
        self._loading: set[str] = set()
        self._overdue: set[str] = set()  # a part of those that are loading
        self._resident: set[str] = set()
        self._evictions: list[str] = []
        self._removed: list[str] = []

    def __contains__(self, version: str) -> bool:
        entry = self._entries.get(version)
        return entry is not None and not entry.removing

    def add(self, version: str, num_bytes: int) -> None:
        """Make a version known. Raises CapacityError if it could never be resident."""
        entry = self._entries.setdefault(version, _Entry(num_bytes=self._room.taken_by(num_bytes)))
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

    def acquire(self, version: str, spare_blocks: int = 0) -> bool:
        """Pin a version for a request; starts a load if it is absent. False: no room now, try again later.

        `spare_blocks`: KV blocks that a load must leave, where both share memory.
        """
        entry = self._entries[version]
        if entry.tier is Tier.DISK:
            if not self._start_load(version, entry, self, spare_blocks):
                return False
        else:
            entry.ahead = False
            if version in self._idle:
                self._leave_idle(version, entry)
        entry.pins += 1
        return True

    def keep(self, version: str) -> bool:
        """Never evict a version, and bring it in if it is absent. False: no room now, try again later."""
        entry = self._entries[version]
        if entry.tier is Tier.DISK and not self._start_load(version, entry, self):
            return False
        entry.kept = True
        if version in self._idle:
            self._leave_idle(version, entry)
        return True

    def bring_in(self, version: str) -> bool:
        """Start to load a version that is absent, for nobody in particular. False: no room now."""
        return self._start_load(version, self._entries[version], self)

    def load_ahead(self, version: str, spare_blocks: int = 0) -> bool:
        """Start to load a version that is absent and that nobody asked for, into memory that nobody has. It
        is the first to go. False: no such memory."""
        entry = self._entries[version]
        entry.ahead = self._start_load(version, entry, _NOBODY, spare_blocks)
        return entry.ahead

    def unpin(self, version: str) -> None:
        """A request no longer counts on the weights; it still names the version."""
        self._unpin(version, self._entries[version])

    def knows(self, version: str) -> bool:
        """Whether there is anything to say of it; it may be about to be removed."""
        return version in self._entries

    def tier(self, version: str) -> Tier:
        return self._entries[version].tier

    def is_resident(self, version: str) -> bool:
        return self._entries[version].tier is self._room.resident_tier

    def num_bytes(self, version: str) -> int:
        return self._entries[version].num_bytes

    @property
    def num_loading(self) -> int:
        """Loads under way that will end before long: without those that are overdue."""
        return len(self._loading) - len(self._overdue)

    @property
    def num_overdue(self) -> int:
        return len(self._overdue)

    @property
    def waits_for_overdue_only(self) -> bool:
        """Whether no memory can be freed before a load ends that is overdue: all else that could be evicted
        already can be."""
        return self.num_overdue > 0 and self.num_loading == 0 and len(self._idle) == len(self._resident)

    @property
    def used_bytes(self) -> int:
        return self._room.used_bytes

    @property
    def budget_bytes(self) -> int:
        return self._room.budget_bytes

    def overdue(self, version: str) -> bool:
        """Do not count on the end of a load any more. Return False if the version is not being loaded, or if
        this is known."""
        if version not in self._loading or version in self._overdue:
            return False
        self._overdue.add(version)
        return True

    def loaded(self, version: str) -> None:
        """A load that `acquire` started is complete."""
        entry = self._entries[version]
        assert entry.tier is Tier.LOADING, f"{version} was not loading"
        entry.tier = self._room.resident_tier
        self._room.settle(version)
        self._loading.remove(version)
        self._overdue.discard(version)
        self._resident.add(version)
        entry.loads += 1
        if entry.pins == 0:  # everyone who waited for it is gone
            self._become_idle_unless_kept(version, entry)
            self._forget_if_drained(version, entry)

    def failed(self, version: str) -> None:
        """A load that `acquire` started came to nothing. Its requests still have to leave."""
        entry = self._entries[version]
        assert entry.tier is Tier.LOADING, f"{version} was not loading"
        entry.tier = Tier.DISK
        entry.kept = entry.ahead = False
        self._loading.remove(version)
        self._overdue.discard(version)
        self._room.give_back(version, entry.num_bytes, entry.last_use)
        self._forget_if_drained(version, entry)

    @property
    def idle_versions(self) -> Collection[str]:
        return self._idle.keys()

    @property
    def oldest_idle_use(self) -> int | None:
        return next((self._entries[version].last_use for version in self._idle), None)

    def evict_oldest(self) -> None:
        self._drop(next(iter(self._idle)))

    def take_evictions(self) -> list[str]:
        """Versions whose weights must be dropped now, since the last call."""
        evictions, self._evictions = self._evictions, []
        return evictions

    def take_removed(self) -> list[str]:
        """Versions whose removal was completed since the last call."""
        removed, self._removed = self._removed, []
        return removed

    @property
    def resident(self) -> Set[str]:
        """Versions whose weights are in memory."""
        return self._resident

    @property
    def loading(self) -> Set[str]:
        """Versions that are being loaded, also those that are overdue."""
        return self._loading

    def snapshot(self) -> list[AdapterStats]:
        """Every version that is known.

        A load counts when it is complete: one that failed has brought nothing into memory.
        """
        return [
            AdapterStats(
                version=version,
                tier=entry.tier,
                num_bytes=entry.num_bytes,
                in_flight=entry.in_flight,
                loads=entry.loads,
            )
            for version, entry in self._entries.items()
        ]

    def check_integrity(self, pins: dict[str, int], in_flight: dict[str, int]) -> None:
        """Assert that the books agree with the requests' own count of pins and with the budget."""
        held = sum(entry.num_bytes for entry in self._entries.values() if entry.tier is not Tier.DISK)
        assert held == self.used_bytes <= self.budget_bytes
        assert self.idle_bytes == sum(self._entries[version].num_bytes for version in self._idle)
        assert self._loading == {v for v, entry in self._entries.items() if entry.tier is Tier.LOADING}
        assert self._overdue <= self._loading
        assert self._resident == {version for version in self._entries if self.is_resident(version)}
        for version, entry in self._entries.items():
            assert entry.pins == pins.get(version, 0), f"{version}: {entry.pins} pins, held by {pins}"
            assert entry.in_flight == in_flight.get(version, 0)
            unused = entry.pins == 0 and not entry.kept
            assert (version in self._idle) == (self.is_resident(version) and unused)
            assert not (entry.removing and entry.in_flight == 0 and entry.tier is not Tier.LOADING)

    def _unpin(self, version: str, entry: _Entry) -> None:
        entry.pins -= 1
        if entry.pins == 0 and self.is_resident(version):
            self._become_idle_unless_kept(version, entry)

    def _start_load(self, version: str, entry: _Entry, idle: IdleAdapters, spare_blocks: int = 0) -> bool:
        if not self._room.take(version, entry.num_bytes, idle, spare_blocks):
            return False
        entry.tier = Tier.LOADING
        self._loading.add(version)
        return True

    def _become_idle_unless_kept(self, version: str, entry: _Entry) -> None:
        if not entry.kept:
            self._become_idle(version, entry)

    def _become_idle(self, version: str, entry: _Entry) -> None:
        self._idle[version] = None
        self.idle_bytes += entry.num_bytes
        entry.last_use = next(self._uses)
        if entry.ahead:
            self._idle.move_to_end(version, last=False)
            entry.last_use = 0

    def _leave_idle(self, version: str, entry: _Entry) -> None:
        del self._idle[version]
        self.idle_bytes -= entry.num_bytes

    def _drop(self, version: str) -> None:
        entry = self._entries[version]
        self._leave_idle(version, entry)
        entry.tier = Tier.DISK
        self._resident.remove(version)
        entry.ahead = False
        self._room.give_back(version, entry.num_bytes, entry.last_use)
        self._evictions.append(version)

    def _forget_if_drained(self, version: str, entry: _Entry) -> None:
        if not entry.removing or entry.in_flight > 0 or entry.tier is Tier.LOADING:
            return
        if self.is_resident(version):
            if entry.kept:
                self._become_idle(version, entry)
            self._drop(version)
        del self._entries[version]
        self._removed.append(version)
