"""The limit on connections, and which connection makes room for another one.

At the limit, a connection without a request is closed to make room for a new one, so that idle connections
lock nobody out. A request may be about to arrive on a connection opened a moment ago, so these have a grace
period:

    opened ──▶ NEW ──headers complete──▶ ACTIVE ──response complete──▶ KEPT (alive)
                │                                                       │ │
                │ ◀──────────── first bytes of the next request ────────┘ │
                ▼ after a grace period                                    ▼
              closed first, the oldest first                            closed next, the oldest first

If none can be closed, a new connection gets one of a few places that allow a single request to /health. If it
requests something else, it moves to an ordinary place like a new connection, or is refused with 503.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Final, Protocol

from loraplex.core.clock import Clock
from loraplex.core.errors import UserError
from loraplex.server.pacing import SlicedWork

logger = logging.getLogger(__name__)

_DESCRIPTORS_FOR_OTHERS: Final = 128
"""Number of descriptors that are not connections: files, sockets to the engine, libraries."""
_DESCRIPTORS_PER_REPLICA: Final = 16
_FEWEST_DESCRIPTORS: Final = 64
"""Number of descriptors below which a start fails somewhere within a library."""
_MAX_DESCRIPTORS: Final = 65_536
_LOG_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """Limits on connections.

    max_health_connections   additional connections for health checks when all others are in use
    grace_s, health_grace_s  seconds that a new connection of either kind keeps its place without the headers
                             of a request when another one needs it; health checks send theirs at once
    write_timeout_s          seconds after which a client that reads nothing is disconnected
    max_header_fields        fields of one request, including trailers of a chunked body
    max_chunk_overhead_bytes bytes of a chunked body around the chunks (sizes, extensions, line ends)
    """

    max_connections: int = 8192
    max_health_connections: int = 32
    grace_s: float = 5.0
    health_grace_s: float = 1.0
    header_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    max_header_bytes: int = 64 * 2**10
    max_header_fields: int = 100
    max_chunk_overhead_bytes: int = 2**20


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as the system allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def connections_within(
    descriptor_limit: int, wanted: int, *, num_replicas: int = 1, is_front: bool = False
) -> int:
    """Return the number of connections that a limit of open files allows. `is_front`: each request is
    forwarded to a server, which takes a second connection.

    Raises UserError if the limit is too low to start at all.
    """
    fewest = _FEWEST_DESCRIPTORS + (num_replicas - 1) * _DESCRIPTORS_PER_REPLICA
    if descriptor_limit < fewest:
        raise UserError(
            f"this process may open {descriptor_limit} files, and needs {fewest} to start; raise the "
            f"limit with `ulimit -n {max(1024, 2 * fewest)}`, or wherever the service or container sets it"
        )
    others = _DESCRIPTORS_FOR_OTHERS + (num_replicas - 1) * _DESCRIPTORS_PER_REPLICA
    return max(1, min(wanted, (descriptor_limit - others) // (2 if is_front else 1)))


def set_write_timeout(connection: socket.socket, timeout_s: float) -> None:
    """Have the system end a connection with ETIMEDOUT when its client reads nothing for `timeout_s`. Only
    Linux supports this; it works even if this process has nothing more to send."""
    if sys.platform == "linux" and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


class Connection(Protocol):
    def give_way(self) -> None:
        """Close this connection, which is not active, because another one needs its place."""


class Places:
    """The connections that share a limit, and the order in which idle ones are closed."""

    def __init__(self, num_places: int, clock: Clock, *, grace_s: float, only_health: bool = False) -> None:
        self._num_places = num_places
        self._clock = clock
        self._grace_s = grace_s
        self.only_health = only_health
        self._new: dict[Connection, float] = {}  # time of arrival in seconds; the oldest first
        self._kept: dict[Connection, None] = {}  # the oldest first
        self._num_active = 0

    @property
    def are_taken(self) -> bool:
        return len(self._new) + len(self._kept) + self._num_active >= self._num_places

    def add(self, connection: Connection) -> None:
        self._new[connection] = self._clock.now_s()

    def remove_one_that_gives_way(self) -> Connection | None:
        oldest, since_s = next(iter(self._new.items()), (None, 0.0))
        if oldest is not None and self._clock.now_s() - since_s >= self._grace_s:
            del self._new[oldest]
            return oldest
        oldest = next(iter(self._kept), None)
        if oldest is not None:
            del self._kept[oldest]
        return oldest

    def began_request(self, connection: Connection) -> None:
        """Record that bytes arrived on a connection that is not active."""
        if connection in self._kept:
            del self._kept[connection]
            self.add(connection)

    def became_active(self, connection: Connection) -> None:
        if connection in self._new:
            del self._new[connection]
            self._num_active += 1

    def became_idle(self, connection: Connection) -> None:
        self._num_active -= 1
        self._kept[connection] = None

    def closed(self, connection: Connection, *, was_active: bool) -> None:
        if was_active:
            self._num_active -= 1
        else:
            self._new.pop(connection, None)
            self._kept.pop(connection, None)


class ConnectionBook:
    """The connections of one server. Outcomes that any client can cause are counted for its log. `parsing`
    shares the time for parsing between the connections."""

    def __init__(
        self, limits: ConnectionLimits, clock: Clock, *, log_interval_s: float = _LOG_INTERVAL_S
    ) -> None:
        self.limits = limits
        self.parsing = SlicedWork(clock)
        self._ordinary = Places(limits.max_connections, clock, grace_s=limits.grace_s)
        self._for_health = Places(
            limits.max_health_connections, clock, grace_s=limits.health_grace_s, only_health=True
        )
        self._outcomes: Counter[str] = Counter()  # since the last line of the log
        self._log_interval_s = log_interval_s
        self._logging: asyncio.Task[None] | None = None  # set while further lines are held back

    def opened(self, connection: Connection) -> Places | None:
        """Add a new connection; return None if there is no room for it."""
        for places in (self._ordinary, self._for_health):
            if self._make_room(places):
                places.add(connection)
                return places
        self.refused()
        return None

    def move_to_ordinary(self, connection: Connection) -> Places | None:
        """Move a connection that is not active out of the places for health checks because it requests
        something else; return None if there is no room and it must be refused."""
        if not self._make_room(self._ordinary):
            self.refused()
            return None
        self._for_health.closed(connection, was_active=False)
        self._ordinary.add(connection)
        return self._ordinary

    def _make_room(self, places: Places) -> bool:
        """Return whether a place is free, after closing an idle connection if necessary."""
        if places.are_taken and (leaver := places.remove_one_that_gives_way()) is not None:
            self._log(f"closed while idle, as all {self.limits.max_connections} connections are taken")
            leaver.give_way()
        return not places.are_taken

    def refused(self) -> None:
        """Count a connection that is closed because there is no room for it or for its request."""
        self._log(f"refused, as all {self.limits.max_connections} are in use")

    def timed_out(self) -> None:
        """Count a connection that is closed because its headers did not arrive."""
        self._log(f"closed, as headers did not arrive within {self.limits.header_timeout_s:g} s")

    def stalled(self) -> None:
        """Count a connection that is closed because its client did not read what was sent to it."""
        self._log(f"closed, as nothing that was sent was taken for {self.limits.write_timeout_s:g} s")

    def _log(self, outcome: str) -> None:
        """Log the first outcome at once, then at most one line per interval."""
        self._outcomes[outcome] += 1
        if self._logging is None:
            self._write_line()
            self._logging = asyncio.create_task(self._log_rest(), name="connection log")

    async def _log_rest(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._log_interval_s)
                if not self._outcomes:
                    break
                self._write_line()
        finally:  # also when the event loop ends
            self._logging = None
            if self._outcomes:
                self._write_line()

    def _write_line(self) -> None:
        counts = "; ".join(f"{count} {outcome}" for outcome, count in self._outcomes.items())
        logger.warning("connections: %s", counts)
        self._outcomes.clear()
