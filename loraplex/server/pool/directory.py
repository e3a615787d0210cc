"""The front's directory of the adapter pool: which replicas have a version, and from which others copy it.

Replicas that have a version, or will soon, are ordered by when they came to it. The first reads the files;
each of the others copies from an earlier one, so that no two wait for each other, or from one that is known
to have it. They form a tree: if many replicas want a version at once, each serves two others.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from loraplex.core.stats import EngineStats
from loraplex.server.engine_sockets import CurveKeys
from loraplex.server.pool.messages import Holder

_MAX_HOLDERS: Final = 3
"""Most holders named to a replica that wants a version."""
_ON_DISK: Final = "disk"
_ARRIVED: Final = ("host", "device")


class PoolDirectory:
    """The pool of one fleet, from its start to its end. `keys`: the key pair by which its replicas
    authenticate each other."""

    def __init__(self) -> None:
        self.keys = CurveKeys.make()
        self._addresses: dict[int, str] = {}
        # By version: replicas, and whether they were seen to have it. One that had it and no longer has it in
        # host memory (a GPU may have the only copy) is not waited for.
        self._orders: dict[str, dict[int, bool]] = {}
        self._in_flight: Counter[tuple[str, int]] = Counter()

    def member(self, replica: int) -> PoolMember:
        return PoolMember(self, replica)

    def opened(self, replica: int, address: str) -> None:
        self._addresses[replica] = address

    def lost(self, replica: int) -> None:
        """Direct no copies to a replica until it reports again what it has."""
        for version in [version for version, order in self._orders.items() if replica in order]:
            self.leave(replica, version)

    def closed(self, replica: int) -> None:
        self._addresses.pop(replica, None)
        self.lost(replica)

    def begin(self, replica: int, version: str) -> tuple[Holder, ...]:
        """Record that a replica is sent a request for a version; return the replicas it can copy it from."""
        self._in_flight[version, replica] += 1
        self._orders.setdefault(version, {}).setdefault(replica, False)
        return self.holders(replica, version)

    def end(self, replica: int, version: str) -> None:
        """Record the end of a request."""
        self._in_flight[version, replica] -= 1
        if not self._in_flight[version, replica]:
            del self._in_flight[version, replica]

    def saw(self, replica: int, stats: EngineStats) -> None:
        """Record the adapters that a replica reports. Requests that it does not know of yet count as well."""
        for adapter in stats.adapters:
            if adapter.tier != _ON_DISK or adapter.in_flight:
                self._orders.setdefault(adapter.version, {})[replica] = adapter.tier in _ARRIVED
            elif (adapter.version, replica) not in self._in_flight:
                self.leave(replica, adapter.version)

    def holders(self, replica: int, version: str) -> tuple[Holder, ...]:
        """Return the replicas that a replica can copy a version from, in the order in which to ask them."""
        arrived = self._orders.get(version, {})
        order = list(arrived)
        place = order.index(replica) if replica in order else len(order)
        parent = max(place - 1, 0) // 2
        ranked = [*order[parent:place][:1], *order[:parent], *order[parent + 1 : place]]
        # The replica may have lost a version that later ones have. These are asked, but never waited for.
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
    """The pool of a single engine, which has no replica to copy from."""

    keys: CurveKeys | None = None

    def opened(self, address: str) -> None:
        """Record the address at which the engine process offers slabs."""

    def lost(self) -> None:
        """Record that the engine process does not answer."""

    def closed(self) -> None:
        """Record that the engine process has ended."""

    def begin(self, version: str | None) -> tuple[Holder, ...]:
        """Record that a request is sent to the engine; return the replicas its adapter can be copied from."""
        return ()

    def end(self, version: str | None) -> None:
        """Record that a request has ended."""

    def forget(self, version: str) -> None:
        """Record that a version is removed."""

    def saw(self, stats: EngineStats) -> None:
        """Record the adapters that the engine reports."""

    def holders(self, version: str) -> tuple[Holder, ...]:
        return ()


class PoolMember(NoPool):
    """The pool as used by the front's handle on one replica."""

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
