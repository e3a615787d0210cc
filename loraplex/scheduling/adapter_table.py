"""Every adapter version that an engine knows: where its weights are, what pins them, and its life cycle.

An engine on a GPU, whose requests use adapters in device memory:

             begin_read            read_ended          acquire, keep,            loaded
                                                       load_ahead
    DISK ---------------> READING ----------> HOST ------------------> COPYING ----------> DEVICE
     ^ ^                     |                | ^                         |                  |
     | `---- read_failed ----'                | `------- failed ----------'                  |
     |                                        | `------- evicted ----------------------------'
     `---------- evicted, unstage ------------'
                                                (to DISK or READING, if the host has no complete copy)

An engine on a CPU, whose requests use adapters in host memory:

             acquire, keep, load_ahead              loaded
    DISK -------------------------------> READING ----------> HOST
     ^                                       |                 |
     `----------------- failed --------------'---- evicted ----'

A version has a *serving* copy, which requests run on. Where there is a host tier in between, it also has a
*staged* copy, which the serving one is loaded from. Each copy is ABSENT, LOADING or RESIDENT in its tier, and
the state above is that of the copy nearest to use. The staged copy has a life of its own: it stays when
the serving copy is complete, may be evicted before it, and may be read again meanwhile. A version for which
the host tier has no room is *unstaged*: its serving copy comes straight from disk, DISK -> COPYING -> DEVICE.

transitions     Waiting requests and prefetching begin loads (`adapter_pins`) and reads (`host_reads`). The
                executor carries them out and reports how they end (`Scheduler.adapter_read`,
                `adapter_loaded`, `adapter_failed`). `victims` chooses what is evicted, when a `Room` is
                asked for memory.
pins            A request pins the serving copy that it runs on or waits for; a load of the serving copy pins
                the staged one. A pinned copy is never evicted, nor is a *kept* one. A copy that was loaded
                *ahead* of any request is evicted first until a request asks for it.
overdue         A load or read that takes too long. It keeps its memory, which may still be written to, and
                is handled in the usual way if it does end. Until then no request waits for it.
remote          Another replica of a fleet has the version. Here that is DISK: while it is READING, the bytes
                are fetched from that replica (`engine.adapter_reads`; in the twin, `Simulator.read_end_s`).

How long a version is known is a second, small state machine. A server asks for the removal when the last
lease on the version has ended (`server.adapter_service`); requests on it are counted as in flight here.

    KNOWN --remove--> REMOVING --nothing in flight, no load--> REMOVED --take_removed--> forgotten, or
      ^                  |                                        |                      ABANDONED until the
      `------ add -------'----------------------------------------'                      read in flight ends
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from itertools import count, islice
from pathlib import Path
from typing import Final

from loraplex.adapters.slab import touched_groups
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.stats import AdapterStats
from loraplex.scheduling.adapter_tier import Copy, Presence, Tier
from loraplex.scheduling.host_room import HostRoom
from loraplex.scheduling.room import Room
from loraplex.scheduling.victims import ReloadSeconds

_MAX_HOST_EVICTIONS: Final = 10_000
"""Host evictions to remember: `take_evictions` may never be called for the host tier."""


class State(StrEnum):
    """The place of an adapter's weights."""

    DISK = "disk"
    READING = "reading"
    HOST = "host"
    COPYING = "copying"
    DEVICE = "device"


class Standing(Enum):
    """The life cycle of a version: known, being removed, or removed."""

    KNOWN = auto()
    REMOVING = auto()
    REMOVED = auto()
    ABANDONED = auto()


_KNOWN, _REMOVING = Standing.KNOWN, Standing.REMOVING
"""Members of an enum are slow to look up, and steps are decided by the sizes of hundreds of versions."""


@dataclass(kw_only=True, slots=True, eq=False)
class Entry:
    """One version. `sources`: where its files are, by path; any of them can be read. `in_flight`: requests on
    it. `loads`: completed loads of the serving copy."""

    serving: Copy
    sources: dict[Path, AdapterSpec] = field(default_factory=dict)
    standing: Standing = Standing.KNOWN
    in_flight: int = 0
    loads: int = 0

    @property
    def staged(self) -> Copy | None:
        return self.serving.source

    @property
    def is_known(self) -> bool:
        return self.standing is _KNOWN or self.standing is _REMOVING


class AdapterTable:
    """Records versions and their transitions; the executor reads, copies and drops what is decided here. A
    `Room` manages the memory: a budget of bytes, or the arena that adapters share with KV blocks.

    `serving`: the tier of the copies that requests run on. `host`: the tier of staged copies; its budget is 0
    if there is no such tier, and then every version is unstaged. `streaming`: bytes of the versions that are
    COPYING and that steps may use already; `assist_delays_s`: of those among them that CPU workers assist
    with, the seconds by which that delays a step.
    """

    def __init__(
        self, room: Room, *, host: HostRoom | None = None, uses: Iterator[int] | None = None
    ) -> None:
        """`room`: memory of serving copies. `host`: memory of staged copies. `uses`: a counter that orders
        the ends of uses, shared with other users of the memory."""
        uses = count(1) if uses is None else uses
        self.serving = Tier(room, uses)
        self._host_room = HostRoom(0) if host is None else host
        self.host = Tier(self._host_room, uses, _MAX_HOST_EVICTIONS)
        self.host.on_change = lambda version: self.serving.revalue(self._entries[version].serving)
        self.unstaged: set[str] = set()
        self.streaming: dict[str, int] = {}
        self.assist_delays_s: dict[str, float] = {}
        self._on_device = room.on_device
        self._entries: dict[str, Entry] = {}
        self._removed: list[str] = []

    def predict_reloads(self, reload_s: ReloadSeconds) -> None:
        """Have victims valued by these predictions. Must be called before any copy is idle."""
        assert not self.serving.idle
        assert not self.host.idle
        self.serving.idle.reload_s = self.host.idle.reload_s = reload_s

    def state(self, version: str) -> State:
        return self._state(self._entries[version])

    # ---- which versions are known

    def __contains__(self, version: str) -> bool:
        entry = self._entries.get(version)
        return entry is not None and entry.standing is Standing.KNOWN

    def add(self, version: str, num_bytes: int, source: AdapterSpec | None = None) -> None:
        """Register a version, or another path of a known one. Raises CapacityError if it could never fit."""
        taken_bytes = self.serving.room.taken_by(num_bytes)
        entry = self._entries.get(version)
        if entry is None or not entry.is_known:
            entry = self._new_entry(Copy(version=version, num_bytes=taken_bytes), entry)
        elif entry.standing is Standing.REMOVING:  # the new addition ends the removal, which is reported
            entry.standing = Standing.KNOWN
            self._removed.append(version)
        if source is not None:
            entry.sources[source.path] = source
        if num_bytes > self.host.room.budget_bytes:
            self.unstaged.add(version)
        else:
            self.unstaged.discard(version)
            if entry.staged is None:
                staged_bytes = self.host.room.taken_by(num_bytes)
                entry.serving.source = Copy(version=version, num_bytes=staged_bytes)

    def remove(self, version: str) -> None:
        """Forget a version as soon as no request is in flight on it. Unknown versions count as removed."""
        entry = self._entries.get(version)
        if entry is None or not entry.is_known:
            self._removed.append(version)
            return
        entry.standing = Standing.REMOVING
        self._finish_removal(entry)

    def take_removed(self) -> list[str]:
        """Return the versions whose removal was completed since the last call."""
        removed, self._removed = self._removed, []
        for version in removed:
            entry = self._entries.get(version)
            if entry is not None and entry.standing is Standing.REMOVED:
                entry.standing = Standing.ABANDONED
                entry.sources.clear()
                self.unstaged.discard(version)
                self._forget_if_abandoned(entry)
        return removed

    def sources(self, version: str) -> list[AdapterSpec]:
        """Return the specs of the files that it can be read from."""
        return list(self._entries[version].sources.values())

    def num_bytes(self, version: str) -> int:
        """Return the bytes that its serving copy takes."""
        return self._entries[version].serving.num_bytes

    def known_bytes(self, version: str) -> int:
        """Return the bytes that its serving copy takes, or 0 if the version was forgotten, as it may be while
        a step uses it."""
        entry = self._entries.get(version)
        if entry is None:
            return 0
        standing = entry.standing
        return entry.serving.num_bytes if standing is _KNOWN or standing is _REMOVING else 0

    # ---- requests on a version

    def enter(self, version: str) -> None:
        """Record that a request on this version arrived."""
        self._entries[version].in_flight += 1

    def leave(self, version: str, *, pinned: bool) -> None:
        """Record that a request on this version ended."""
        entry = self._entries[version]
        if pinned:
            self.serving.unpin(entry.serving)
        entry.in_flight -= 1
        assert entry.in_flight >= entry.serving.pins >= 0
        self._finish_removal(entry)

    # ---- the serving copy

    def is_absent(self, version: str) -> bool:
        """Return whether there is no serving copy, complete or loading."""
        return self._entries[version].serving.presence is Presence.ABSENT

    def acquire(self, version: str, spare_blocks: int = 0) -> bool:
        """Pin a version for a request; start a load if it is absent. Return False if there is no room now.

        `spare_blocks`: KV blocks that a load must leave, where both share memory.
        """
        entry = self._entries[version]
        if entry.serving.presence is Presence.ABSENT and not self._begin_load(entry, spare_blocks):
            return False
        self.serving.pin(entry.serving)
        return True

    def unpin(self, version: str) -> None:
        """Unpin the weights for a request that stays in flight on the version."""
        self.serving.unpin(self._entries[version].serving)

    def keep(self, version: str) -> bool:
        """Never evict a version, and load it if it is absent. Return False if there is no room now."""
        entry = self._entries[version]
        if entry.serving.presence is Presence.ABSENT and not self._begin_load(entry):
            return False
        self.serving.keep(entry.serving)
        return True

    def load_ahead(self, version: str, spare_blocks: int = 0) -> bool:
        """Start to load an absent version that no request asked for, without evicting another. It is evicted
        first. Return False if there is no room now."""
        return self._begin_load(self._entries[version], spare_blocks, ahead=True)

    def num_groups(self, version: str) -> int:
        """Return how many groups of linears a version changes; 1 if nothing is known of its weights."""
        sources = self._entries[version].sources
        return max((len(touched_groups(spec)) for spec in islice(sources.values(), 1)), default=1)

    def stream(self, version: str, *, assist_delay_s: float | None = None) -> None:
        """Let steps use a version that is COPYING: each layer waits for its own weights, or for CPU workers,
        if they assist with it."""
        self.streaming[version] = self._entries[version].serving.num_bytes
        if assist_delay_s is not None:
            self.assist_delays_s[version] = assist_delay_s

    def loaded(self, version: str) -> None:
        """Record that a load is complete."""
        entry = self._entries[version]
        self.serving.end(entry.serving)
        entry.loads += 1
        self._end_load(entry)

    def failed(self, version: str) -> None:
        """Record that a load failed. Its requests still have to `leave`."""
        entry = self._entries[version]
        self.serving.fail(entry.serving)
        self._end_load(entry)

    def overdue(self, version: str) -> bool:
        """Mark a load or read as overdue. Return False if there is none in flight, or if it is already
        marked."""
        is_load, is_read = self.serving.set_overdue(version), self.host.set_overdue(version)
        return is_load or is_read

    # ---- the staged copy

    def can_load(self, version: str) -> bool:
        """Return whether a load could begin now: the version is staged, or loads from disk."""
        copy = self._staged_copy(version)
        return copy is None or copy.presence is Presence.RESIDENT

    def can_read(self, version: str) -> bool:
        """Return whether a read could begin: the version has a staged copy, which is absent."""
        copy = self._staged_copy(version)
        return copy is not None and copy.presence is Presence.ABSENT

    def begin_read(self, version: str, *, ahead: bool = False) -> bool:
        """Start to read a version into the host tier. Return False if there is no room now. `ahead`: no
        request asked for it; nothing is evicted for it, and it is evicted first."""
        copy = self._staged_copy(version)
        assert copy is not None
        return self.host.begin(copy, ahead=ahead)

    def read_ended(self, version: str) -> None:
        entry = self._entries[version]
        assert entry.staged is not None
        self.host.end(entry.staged)
        self._forget_if_abandoned(entry)

    def read_failed(self, version: str) -> None:
        entry = self._entries[version]
        assert entry.staged is not None
        self.host.fail(entry.staged)
        self._forget_if_abandoned(entry)

    def stop_staging(self, version: str) -> None:
        """Load a version straight from disk until it is added again, because it finds no room in the host
        tier."""
        entry = self._entries[version]
        assert entry.staged is not None
        assert entry.staged.presence is Presence.ABSENT
        entry.serving.source = None
        self.unstaged.add(version)

    def unstage(self, version: str) -> None:
        """Evict the staged copy unless it is being read or copied."""
        copy = self._staged_copy(version)
        if copy is not None and copy.is_idle:
            self.host.evict(copy)

    def host_place(self, version: str) -> int | None:
        """Return the first byte of the staged copy, complete or being read; None if there is none."""
        copy = self._entries[version].staged
        if copy is None or copy.presence is Presence.ABSENT:
            return None
        return self._host_room.place_of(version)

    # ---- state

    def snapshot(self) -> list[AdapterStats]:
        """Return the stats of every known version. Only completed loads are counted."""
        return [
            AdapterStats(
                version=version,
                tier=self._shown(entry),
                num_bytes=entry.serving.num_bytes,
                in_flight=entry.in_flight,
                loads=entry.loads,
            )
            for version, entry in self._entries.items()
            if entry.is_known
        ]

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that each version has of the serving copies' memory."""
        return _held_bytes(entry.serving for entry in self._entries.values())

    def check_integrity(self, pins: Mapping[str, int], in_flight: Mapping[str, int]) -> None:
        """Assert that the table agrees with the requests' own count of pins and with the memory."""
        staged_copies = [entry.staged for entry in self._entries.values() if entry.staged is not None]
        self.serving.check_integrity([entry.serving for entry in self._entries.values()])
        self.host.check_integrity(staged_copies)
        self._host_room.check_integrity(_held_bytes(staged_copies))
        assert self.assist_delays_s.keys() <= self.streaming.keys() <= self.serving.loading
        for version, entry in self._entries.items():
            serving, staged = entry.serving, entry.staged
            assert serving.pins == pins.get(version, 0), f"{version}: {serving.pins} pins, held by {pins}"
            assert entry.in_flight == in_flight.get(version, 0)
            if not entry.is_known:
                assert serving.presence is Presence.ABSENT
            if entry.standing is Standing.REMOVING:
                assert entry.in_flight > 0 or serving.presence is Presence.LOADING
            if entry.standing is Standing.ABANDONED:
                assert staged is not None
                assert staged.presence is Presence.LOADING
            else:
                assert (staged is None) == (version in self.unstaged)
            if staged is not None and staged.pins > 0:
                assert staged.pins == 1
                assert serving.presence is Presence.LOADING

    # ---- helpers

    def _new_entry(self, serving: Copy, removed: Entry | None) -> Entry:
        """`removed`: the version's entry before; only its staged copy and sources, if any, are left of it."""
        entry = Entry(serving=serving)
        if removed is not None:
            serving.source, entry.sources = removed.staged, removed.sources
            del self._entries[serving.version]
        self._entries[serving.version] = entry
        return entry

    def _begin_load(self, entry: Entry, spare_blocks: int = 0, *, ahead: bool = False) -> bool:
        serving, staged = entry.serving, entry.staged
        assert staged is None or staged.presence is Presence.RESIDENT, f"{serving.version} is not read yet"
        if not self.serving.begin(serving, spare_blocks, ahead=ahead):
            return False
        if staged is not None:
            self.host.pin(staged)
        return True

    def _end_load(self, entry: Entry) -> None:
        self.streaming.pop(entry.serving.version, None)
        self.assist_delays_s.pop(entry.serving.version, None)
        if entry.staged is not None and entry.staged.pins > 0:
            self.host.unpin(entry.staged)
        self._finish_removal(entry)

    def _finish_removal(self, entry: Entry) -> None:
        """REMOVING -> REMOVED, if neither a request nor a load uses it."""
        serving = entry.serving
        if entry.standing is not Standing.REMOVING or entry.in_flight > 0:
            return
        if serving.presence is Presence.LOADING:
            return
        self.serving.unkeep(serving)
        if serving.presence is Presence.RESIDENT:
            self.serving.evict(serving)
        entry.standing = Standing.REMOVED
        self._removed.append(serving.version)

    def _forget_if_abandoned(self, entry: Entry) -> None:
        """ABANDONED -> forgotten, unless a read still writes to its memory."""
        if entry.standing is not Standing.ABANDONED:
            return
        if entry.staged is not None and entry.staged.presence is Presence.LOADING:
            return
        if entry.staged is not None and entry.staged.presence is Presence.RESIDENT:
            self.host.evict(entry.staged)
        del self._entries[entry.serving.version]

    def _staged_copy(self, version: str) -> Copy | None:
        entry = self._entries.get(version)
        return None if entry is None or entry.standing is Standing.ABANDONED else entry.serving.source

    def _state(self, entry: Entry) -> State:
        serving, staged = entry.serving.presence, entry.staged
        if serving is not Presence.ABSENT:
            if self._on_device:
                return State.COPYING if serving is Presence.LOADING else State.DEVICE
            return State.READING if serving is Presence.LOADING else State.HOST
        if staged is None or staged.presence is Presence.ABSENT:
            return State.DISK
        return State.READING if staged.presence is Presence.LOADING else State.HOST

    def _shown(self, entry: Entry) -> str:
        """Return the tier that users see, in which only serving copies are "loading"."""
        if entry.serving.presence is Presence.LOADING:
            return "loading"
        state = self._state(entry)
        return State.DISK if state is State.READING else state


def _held_bytes(copies: Iterable[Copy]) -> dict[str, int]:
    return {copy.version: copy.num_bytes for copy in copies if copy.presence is not Presence.ABSENT}
