"""The front's knowledge of the adapter pool: which replicas have a version, and whom others copy it from.

The replicas that have a version, or are about to, stand in the order in which they came to it. The first
reads its files; each of the others copies from one that stands before it, so that nobody waits for somebody
who waits for him, or from one that was seen to have it. They form a tree: of many replicas that want a
version at once, each has two to serve.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from loraplex.core.stats import EngineStats
from loraplex.server.engine_sockets import CurveKeys
from loraplex.server.pool.messages import Holder

_MAX_HOLDERS: Final = 3
"""As many replicas are named to one that wants a version."""
_ON_DISK: Final = "disk"
_ARRIVED: Final = ("host", "device")


class PoolDirectory:
    """Of one fleet, from its start to its end. `keys`: the pair with which its replicas know each other."""

    def __init__(self) -> None:
        self.keys = CurveKeys.make()
        self._addresses: dict[int, str] = {}
        # By version: replicas, and whether they were seen to have it. One that was and has it no more in its
        # host memory, as a GPU may have it alone, is not waited for.
        self._orders: dict[str, dict[int, bool]] = {}
        self._in_flight: Counter[tuple[str, int]] = Counter()

    def member(self, replica: int) -> PoolMember:
        return PoolMember(self, replica)

    def opened(self, replica: int, address: str) -> None:
        self._addresses[replica] = address

    def lost(self, replica: int) -> None:
        """Send nobody to a replica before it says again what it has."""
        for version in [version for version, order in self._orders.items() if replica in order]:
            self.leave(replica, version)

    def closed(self, replica: int) -> None:
        self._addresses.pop(replica, None)
        self.lost(replica)

    def begin(self, replica: int, version: str) -> tuple[Holder, ...]:
        """Record that a replica is sent a request for a version; return whom it copies it from."""
        self._in_flight[version, replica] += 1
        self._orders.setdefault(version, {}).setdefault(replica, False)
        return self.holders(replica, version)

    def end(self, replica: int, version: str) -> None:
        """Record the end of a request."""
        self._in_flight[version, replica] -= 1
        if not self._in_flight[version, replica]:
            del self._in_flight[version, replica]

    def saw(self, replica: int, stats: EngineStats) -> None:
        """Take over what a replica says to have. Requests that it does not know of yet count as well."""
        for adapter in stats.adapters:
            if adapter.tier != _ON_DISK or adapter.in_flight:
                self._orders.setdefault(adapter.version, {})[replica] = adapter.tier in _ARRIVED
            elif (adapter.version, replica) not in self._in_flight:
                self.leave(replica, adapter.version)

    def holders(self, replica: int, version: str) -> tuple[Holder, ...]:
        """Return whom a replica copies a version from, in the order in which to ask."""
        arrived = self._orders.get(version, {})
        order = list(arrived)
        place = order.index(replica) if replica in order else len(order)
        parent = max(place - 1, 0) // 2
        ranked = [*order[parent:place][:1], *order[:parent], *order[parent + 1 : place]]
        # It may have lost since what those behind it have; nobody is waited for among these.
        ranked += [each for each in order[place + 1 :] if arrived[each]]
        named = [
            Holder(
                self._addresses[each],
                awaited=not arrived[each] and (version, each) in self._in_flight,
                number=each,
            )
            for each in ranked
            if each in self._addresses
        ]
        return tuple(named[:_MAX_HOLDERS])

    def leave(self, replica: int, version: str) -> None:
        """Record that a replica does not have a version any more."""
        order = self._orders.get(version)
        if order is not None:
            order.pop(replica, None)
            if not order:
                del self._orders[version]


class NoPool:
    """The pool of a single engine: there is nobody to copy from."""

    keys: CurveKeys | None = None

    def opened(self, address: str) -> None:
        """Its engine process offers slabs at this address."""

    def lost(self) -> None:
        """Its engine process does not answer."""

    def closed(self) -> None:
        """Its engine process has ended."""

    def begin(self, version: str | None) -> tuple[Holder, ...]:
        """A request is sent there; return whom its adapter can be copied from."""
        return ()

    def end(self, version: str | None) -> None:
        """A request has ended."""

    def forget(self, version: str) -> None:
        """A version is removed."""

    def saw(self, stats: EngineStats) -> None:
        """It says which adapters it has."""

    def holders(self, version: str) -> tuple[Holder, ...]:
        return ()


class PoolMember(NoPool):
    """The pool as the front's handle on one replica uses it."""

    def __init__(self, directory: PoolDirectory, replica: int) -> None:
        self._directory = directory
        self._replica = replica
        self.keys = directory.keys

    def opened(self, address: str) -> None:
        self._directory.opened(self._replica, address)

    def lost(self) -> None:
        self._directory.lost(self._replica)

    def closed(self) -> None:
        self._directory.closed(self._replica)

    def begin(self, version: str | None) -> tuple[Holder, ...]:
        return () if version is None else self._directory.begin(self._replica, version)

    def end(self, version: str | None) -> None:
        if version is not None:
            self._directory.end(self._replica, version)

    def forget(self, version: str) -> None:
        self._directory.leave(self._replica, version)

    def saw(self, stats: EngineStats) -> None:
        self._directory.saw(self._replica, stats)

    def holders(self, version: str) -> tuple[Holder, ...]:
        return self._directory.holders(self._replica, version)
