"""Track which replicas have which adapters, from their reports and from requests in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from loraplex.fleet.tiers import AdapterTiers
from loraplex.server.fleet.routing_events import Holds, Lost, RoutingEvent


class Held(NamedTuple):
    """The memories in which a replica has an adapter."""

    on_device: bool = False
    on_host: bool = False


class HeldAdapters:
    """Keeps the tiers that routers see up to date. Every change is recorded as an event."""

    def __init__(
        self, tiers: AdapterTiers, numbers: Mapping[str, int], record: Callable[[RoutingEvent], None]
    ) -> None:
        """`numbers`: the numbers of the known versions; more may be added later."""
        self._tiers = tiers
        self._numbers = numbers
        self._record = record
        self._held: dict[tuple[int, str], Held] = {}  # within each replica the last used is last

    def has(self, replica: int, version: str) -> bool:
        """Return whether a replica has a version in its memory, as far as known."""
        return (replica, version) in self._held

    def events(self) -> Iterator[Holds]:
        """Yield everything that is known, as events."""
        for (replica, version), held in self._held.items():
            yield _holds(replica, version, held)

    def set(self, replica: int, version: str, held: Held) -> None:
        """Record where a replica has an adapter, if that has changed."""
        key, number, tiers = (replica, version), self._numbers[version], self._tiers
        if held == self._held.get(key, Held()):
            return
        self._record(_holds(replica, version, held))
        if any(held):
            self._held[key] = held
        else:
            del self._held[key]
        (tiers.loaded if held.on_device else tiers.evicted)(replica, number)
        (tiers.staged if held.on_host else tiers.dropped)(replica, number)

    def use(self, replica: int, version: str, most: int | None) -> None:
        """Record that a replica will compute with an adapter. If it can have only `most` adapters, the least
        recently used one is taken to be evicted, which servers that do not report their adapters presumably
        do."""
        key, all_held = (replica, version), self._held
        self.set(replica, version, all_held.get(key, Held())._replace(on_device=True))
        all_held[key] = all_held.pop(key)
        if most is not None:
            there = [each for (where, each), held in all_held.items() if where == replica and held.on_device]
            for oldest in there[: max(len(there) - most, 0)]:
                self.set(replica, oldest, all_held[replica, oldest]._replace(on_device=False))

    def forget(self, version: str) -> None:
        """Forget a version that is removed from all replicas."""
        for key in [key for key in self._held if key[1] == version]:
            del self._held[key]
            self._tiers.evicted(key[0], self._numbers[version])
            self._tiers.dropped(key[0], self._numbers[version])

    def lose(self, replica: int) -> None:
        """Record that a replica is down and has lost all adapters."""
        lost = [version for where, version in self._held if where == replica]
        if lost:
            self._record(Lost(replica=replica))
        for version in lost:
            del self._held[replica, version]
            self._tiers.evicted(replica, self._numbers[version])
            self._tiers.dropped(replica, self._numbers[version])


def _holds(replica: int, version: str, held: Held) -> Holds:
    return Holds(replica=replica, version=version, on_device=held.on_device, on_host=held.on_host)
