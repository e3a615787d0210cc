"""One memory and the copies of adapters in it: loading, resident, idle.

    ABSENT --begin--> LOADING --end--> RESIDENT --evict--> ABSENT
                         `----fail---> ABSENT

The adapter table has two tiers: one for the copies that requests run on, one for the copies in host memory
that those are loaded from (`adapter_table`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from loraplex.scheduling.room import Room
from loraplex.scheduling.victims import NO_ADAPTERS, IdleAdapter, IdleAdapters, Uses


class Presence(Enum):
    """The state of a copy in its tier."""

    ABSENT = auto()
    LOADING = auto()
    RESIDENT = auto()


@dataclass(kw_only=True, slots=True, eq=False)
class Copy:
    """A version's weights in one tier. `num_bytes`: bytes they take there. `source`: the copy that this one
    is loaded from, if there is one. `pins`, `kept`: what keeps it from being evicted. `ahead`: no request has
    asked for it yet. `awaited`: it was brought in for a request that has not pinned it yet. `last_use`: when
    the last pin was given back; 0 if there was none. `uses`: pins so far; the request that a copy is brought
    in for counts from the beginning."""

    version: str
    num_bytes: int
    source: Copy | None = None
    presence: Presence = Presence.ABSENT
    pins: int = 0
    kept: bool = False
    ahead: bool = False
    awaited: bool = False
    last_use: int = 0
    uses: Uses = field(default_factory=Uses)

    @property
    def is_idle(self) -> bool:
        return self.presence is Presence.RESIDENT and self.pins == 0 and not self.kept

    @property
    def reloads_from_host(self) -> bool:
        return self.source is not None and self.source.presence is Presence.RESIDENT


class Tier:
    """One memory and the copies in it: `loading`, of which some are `overdue`, and `resident`, of which some
    are `idle`. Each method is a transition of a copy or of its pins. The adapter table calls them; rooms call
    `evict`. `on_change`: called with each version whose copy is complete, or was evicted."""

    def __init__(self, room: Room, uses: Iterator[int], max_evictions: int | None = None) -> None:
        """`uses`: a counter that orders the ends of uses. `max_evictions`: number of evictions remembered."""
        self.room = room
        self._uses = uses
        self.loading: set[str] = set()
        self.overdue: set[str] = set()
        self.resident: set[str] = set()
        self.idle = IdleAdapters(self.resident)
        self.on_change: Callable[[str], None] = lambda version: None
        self._num_uses = 0
        self._evictions: deque[str] = deque(maxlen=max_evictions)

    @property
    def num_loading(self) -> int:
        """Number of loads that will end before long, that is, without overdue ones."""
        return len(self.loading) - len(self.overdue)

    @property
    def waits_for_overdue_only(self) -> bool:
        """Return whether no memory can be freed before an overdue load ends: all resident copies are idle."""
        return bool(self.overdue) and self.num_loading == 0 and len(self.idle) == len(self.resident)

    def begin(self, copy: Copy, spare_blocks: int = 0, *, ahead: bool = False) -> bool:
        """ABSENT -> LOADING. Return False if there is no room now. `spare_blocks`: KV blocks that must
        remain, where both share memory. `ahead`: no request asked for it, and no adapter is evicted for
        it."""
        assert copy.presence is Presence.ABSENT
        idle = NO_ADAPTERS if ahead else self.idle
        if not self.room.take(copy.version, copy.num_bytes, idle, self.evict, spare_blocks):
            return False
        copy.presence, copy.ahead, copy.awaited = Presence.LOADING, ahead, not ahead
        if copy.awaited:
            self._count_use(copy)
        self.loading.add(copy.version)
        return True

    def end(self, copy: Copy) -> None:
        """LOADING -> RESIDENT."""
        assert copy.presence is Presence.LOADING, f"{copy.version} was not loading"
        copy.presence = Presence.RESIDENT
        self.room.settle(copy.version)
        self.loading.remove(copy.version)
        self.overdue.discard(copy.version)
        self.resident.add(copy.version)
        if copy.is_idle:  # no request has pinned it yet, or all of them are gone
            self._become_idle(copy)
        self.on_change(copy.version)

    def fail(self, copy: Copy) -> None:
        """LOADING -> ABSENT."""
        assert copy.presence is Presence.LOADING, f"{copy.version} was not loading"
        copy.presence = Presence.ABSENT
        copy.kept = copy.ahead = copy.awaited = False
        self.loading.remove(copy.version)
        self.overdue.discard(copy.version)
        self.room.give_back(copy.version, copy.num_bytes, copy.last_use)

    def evict(self, victim: IdleAdapter) -> None:
        """RESIDENT -> ABSENT; the copy must be idle."""
        assert isinstance(victim, Copy)
        assert victim.is_idle, f"{victim.version} is in use"
        self.idle.remove(victim)
        victim.presence = Presence.ABSENT
        victim.ahead = victim.awaited = False
        self.resident.remove(victim.version)
        self.room.give_back(victim.version, victim.num_bytes, victim.last_use)
        self._evictions.append(victim.version)
        self.on_change(victim.version)

    def take_evictions(self) -> list[str]:
        """Return the versions evicted since the last call: their copies must be dropped, or were
        overwritten."""
        evictions = list(self._evictions)
        self._evictions.clear()
        return evictions

    def pin(self, copy: Copy) -> None:
        """Pin a copy that is loading or resident."""
        assert copy.presence is not Presence.ABSENT
        if copy.is_idle:
            self.idle.remove(copy)
        if not copy.awaited:
            self._count_use(copy)
        copy.ahead = copy.awaited = False
        copy.pins += 1

    def unpin(self, copy: Copy) -> None:
        copy.pins -= 1
        if copy.is_idle:
            self._become_idle(copy)

    def keep(self, copy: Copy) -> None:
        if copy.is_idle:
            self.idle.remove(copy)
        copy.kept = True

    def unkeep(self, copy: Copy) -> None:
        if copy.kept:
            copy.kept = False
            if copy.is_idle:
                self._become_idle(copy)

    def revalue(self, copy: Copy) -> None:
        """Record that reloading a copy takes longer than before, or shorter."""
        if copy.is_idle:
            self.idle.remove(copy)
            self.idle.add(copy)

    def set_overdue(self, version: str) -> bool:
        """Mark a load as overdue. Return False if the version is not loading, or is already marked."""
        if version not in self.loading or version in self.overdue:
            return False
        self.overdue.add(version)
        return True

    def check_integrity(self, copies: Collection[Copy]) -> None:
        """Assert that the sets agree with all copies of this tier, and with the memory."""
        held = [copy for copy in copies if copy.presence is not Presence.ABSENT]
        assert sum(copy.num_bytes for copy in held) == self.room.used_bytes <= self.room.budget_bytes
        assert self.loading == {c.version for c in held if c.presence is Presence.LOADING}
        assert self.overdue <= self.loading
        assert self.resident == {c.version for c in held if c.presence is Presence.RESIDENT}
        assert set(self.idle) == {c for c in held if c.is_idle}
        assert self.idle.num_bytes == sum(c.num_bytes for c in self.idle)

    def _count_use(self, copy: Copy) -> None:
        self._num_uses += 1
        copy.uses.add(self._num_uses)

    def _become_idle(self, copy: Copy) -> None:
        copy.last_use = 0 if copy.ahead else next(self._uses)
        self.idle.add(copy)
