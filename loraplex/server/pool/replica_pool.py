"""A replica's part in the adapter pool of its fleet: the slabs it offers, and the replicas it copies from.

It is part of every engine process, and has no effect until the front reports other replicas.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import zmq

from loraplex.engine.peers import ComesLaterError, SlabKey
from loraplex.server.engine_sockets import Context, CurveKeys
from loraplex.server.pool.messages import Holder, SlabState
from loraplex.server.pool.offers import Offers
from loraplex.server.pool.slab_client import CopyError, Link, NoAnswerError, SlabCopy, WrongBytesError

if TYPE_CHECKING:
    from loraplex.engine.peers import SlabBytes
    from loraplex.server.pool.slab_server import SlabServer

logger = logging.getLogger(__name__)

_MAX_KNOWN: Final = 10_000
"""Number of versions whose holders are remembered."""
_WAIT_S: Final = {SlabState.COMES: 10.0, SlabState.ABSENT: 2.0}
"""Seconds to wait for a replica that is reading the slab, and for one that has requests for it but has not
begun. Longer than a step, and short enough if two replicas wait for each other."""
_SILENT_S: Final = 10.0
"""Seconds for which a replica that did not answer is not asked again: each adapter would wait again."""
_ABANDONED_S: Final = 60.0
"""Seconds after which a search that waits for one replica is dropped: its adapter is no longer wanted."""


@dataclass(kw_only=True)
class _Search:
    """The replicas still to be asked, a connection to the first, and the time since which it is asked."""

    holders: deque[Holder]
    link: Link | None = None
    since_s: float = field(default_factory=time.monotonic)

    def next(self) -> None:
        self.hang_up()
        self.holders.popleft()
        self.since_s = time.monotonic()

    def hang_up(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None


class ReplicaPool:
    """The implementation of `engine.peers.Peers` over the network."""

    def __init__(self) -> None:
        self._offers = Offers()
        self._keys: CurveKeys | None = None
        self._server: SlabServer | None = None
        self._context: Context | None = None
        self._lock = threading.Lock()  # guards the fields below
        self._holders: dict[str, Sequence[Holder]] = {}  # by version
        self._searches: dict[SlabKey, _Search] = {}  # to be resumed later
        self._silent_since_s: dict[str, float] = {}  # by address
        self._num_copying = 0
        self._num_failures = 0

    def join(self, keys: CurveKeys, host: str) -> str:
        """Start to offer slabs at an address of this machine, and to copy those of others; return the
        address.

        Raises zmq.ZMQError if nothing can listen there.
        """
        from loraplex.server.pool.slab_server import SlabServer  # not needed by a single server

        assert self._server is None, "a replica is of one fleet"
        server = SlabServer(self._offers, keys, host)
        self._keys = keys
        self._context = zmq.Context()
        self._server = server
        return self._server.address

    def locate(self, version: str, holders: Sequence[Holder]) -> None:
        """Record which replicas have a version, in the order in which to ask them."""
        with self._lock:
            self._holders.pop(version, None)
            if holders:
                self._holders[version] = holders
            if len(self._holders) > _MAX_KNOWN:
                del self._holders[next(iter(self._holders))]

    def close(self) -> None:
        """Leave the pool; must be called before the memory of the slabs is freed. Copies from others that are
        in progress are left to the end of the process. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        with self._lock:
            if self._context is not None and not self._num_copying:
                for search in self._searches.values():
                    search.hang_up()
                self._context.destroy(linger=0)

    # ---- engine.peers.Peers

    @property
    def is_joined(self) -> bool:
        return self._server is not None

    @property
    def num_failures(self) -> int:
        return self._num_failures

    def withdraw(self, memory: SlabBytes) -> None:
        self._offers.withdraw(memory)

    def reading(self, key: SlabKey) -> None:
        self._offers.comes(key)

    def offer(self, key: SlabKey, slab: SlabBytes, digest: bytes | None) -> None:
        self._offers.add(key, slab, digest)

    def settle(self, key: SlabKey) -> None:
        self._offers.settle(key)

    def forget(self, version: str) -> None:
        self._offers.forget(version)

    def fetch(self, key: SlabKey, target: SlabBytes) -> bytes | None:
        with self._lock:
            search = self._searches.pop(key, None)
            if search is None:
                search = _Search(holders=deque(self._holders.get(key.version, ())))
            self._num_copying += 1
        try:
            return self._search(search, key, target)
        except BaseException as error:
            if not isinstance(error, ComesLaterError):
                search.hang_up()
            raise
        finally:
            with self._lock:
                self._num_copying -= 1

    def _search(self, search: _Search, key: SlabKey, target: SlabBytes) -> bytes | None:
        """Ask one replica after the other; each continues the copy where the last one stopped."""
        copy = SlabCopy(key, target, on_first=lambda: self._offers.comes(key))
        while search.holders and not copy.is_late:
            num_done, holder = copy.num_done, search.holders[0]
            if self._is_silent(holder):
                search.next()
                continue
            try:
                state = copy.go_on(self._link(search))
            except CopyError as error:
                self._failed(key, holder, error)
                if isinstance(error, NoAnswerError) and copy.num_done == num_done:
                    with self._lock:
                        self._silent_since_s[holder.address] = time.monotonic()
                search.hang_up()
                if isinstance(error, WrongBytesError):
                    copy.restart()
                elif copy.num_done > num_done:
                    continue  # perhaps only the connection was cut
                search.next()
                continue
            if state is SlabState.HELD:
                search.hang_up()
                return copy.digest
            if state is SlabState.OUT_OF_RANGE:
                self._failed(key, holder, CopyError("it has other bytes under this version"))
            elif (state is SlabState.COMES or holder.awaited) and self._may_wait(search, state):
                self._set_aside(key, search)
                raise ComesLaterError
            search.next()
        search.hang_up()
        return None

    def _is_silent(self, holder: Holder) -> bool:
        asked_s = time.monotonic() - _SILENT_S
        with self._lock:
            for address in [each for each, since_s in self._silent_since_s.items() if since_s <= asked_s]:
                del self._silent_since_s[address]
            return holder.address in self._silent_since_s

    def _set_aside(self, key: SlabKey, search: _Search) -> None:
        """Keep a search to be resumed later, and close abandoned ones."""
        begun_s = time.monotonic() - _ABANDONED_S
        with self._lock:
            for other in [other for other, each in self._searches.items() if each.since_s < begun_s]:
                self._searches.pop(other).hang_up()
            self._searches[key] = search

    def _may_wait(self, search: _Search, state: SlabState) -> bool:
        return time.monotonic() - search.since_s < _WAIT_S[state]

    def _link(self, search: _Search) -> Link:
        assert self._context is not None
        assert self._keys is not None
        if search.link is None:
            search.link = Link(self._context, search.holders[0].address, self._keys)
        return search.link

    def _failed(self, key: SlabKey, holder: Holder, error: CopyError) -> None:
        with self._lock:
            self._num_failures += 1
        logger.warning(
            "adapter version %s was not copied from %s: %s; another one is asked, or its files are read",
            *(key.version[:12], holder.shown, error),
        )
