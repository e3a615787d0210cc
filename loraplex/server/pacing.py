"""Bursts in small portions: what many clients do at once leaves the event loop a turn for everybody else.

Two thousand requests in one moment are seconds of work, and no stream gets a token meanwhile. So only a few
connections are accepted, only a few requests begin or are torn down, and input is parsed for only a
millisecond in each turn of the loop; between two turns the loop looks at its sockets and timers. Health
checks do not queue.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.core.clock import Clock

logger = logging.getLogger(__name__)

_PER_TURN: Final = 1
"""Requests that begin or are torn down in one turn of the loop; each takes up to a millisecond."""
_ACCEPTED_PER_TURN: Final = 8
_WORK_PER_TURN_S: Final = 0.0005
_RETRY_ACCEPT_S: Final = 0.1


class Pacer:
    """Lets a few callers pass in each turn of the event loop, first come first served."""

    def __init__(self, per_turn: int = _PER_TURN) -> None:
        self._per_turn = per_turn
        self._num_passed = 0  # in this turn
        self._is_counting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Return at once, or in the turn of the loop in which it is the caller's time."""
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next_turn, loop)
        if self._num_passed < self._per_turn and not self._waiting:
            self._num_passed += 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_passed = 0
        while self._waiting and self._num_passed < self._per_turn:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its caller was cancelled
                waiter.set_result(None)
                self._num_passed += 1
        self._is_counting = self._num_passed > 0
        if self._is_counting:
            loop.call_soon(self._next_turn, loop)


class SlicedWork:
    """Does the work of many in slices, for a short time in each turn of the event loop.

    Work is a callable that does one slice and returns whether there is more. First slices go first, those of
    urgent work before the others, so that whoever has little to do does not wait behind those who have much;
    these take turns. No kind waits for ever: each turn begins with one slice of every one.
    """

    def __init__(self, clock: Clock, *, per_turn_s: float = _WORK_PER_TURN_S) -> None:
        self._clock = clock
        self._per_turn_s = per_turn_s
        self._left_s = per_turn_s  # of this turn
        self._is_counting = False
        self._urgent: deque[Callable[[], bool]] = deque()
        self._first: deque[Callable[[], bool]] = deque()
        self._rest: deque[Callable[[], bool]] = deque()

    def do(self, work: Callable[[], bool], *, urgent: bool = False) -> None:
        """Begin at once if there is time left in this turn, and go on in the turns to come."""
        (self._urgent if urgent else self._first).append(work)
        self._do_slices()
        self._count()

    def do_later(self, work: Callable[[], bool]) -> None:
        """Begin in the next turn at the earliest."""
        self._rest.append(work)
        self._count()

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_counting = False
        self._left_s = self._per_turn_s
        for waiting in (self._urgent, self._rest, self._first):  # none of which may hold up another for ever
            if waiting:
                self._do_slice(waiting)
        self._do_slices()
        if self._urgent or self._first or self._rest:
            self._count()

    def _do_slices(self) -> None:
        while self._left_s > 0 and (waiting := self._urgent or self._first or self._rest):
            self._do_slice(waiting)

    def _do_slice(self, waiting: deque[Callable[[], bool]]) -> None:
        work, began_s = waiting.popleft(), self._clock.now_s()
        if work():
            self._rest.append(work)
        self._left_s -= self._clock.now_s() - began_s


class PacingMiddleware:
    """Begins a few requests in each turn of the loop, but for those that must be answered at any time."""

    def __init__(self, app: ASGIApp, *, pacer: Pacer, free_prefix: str = "/health") -> None:
        self._app = app
        self._pacer = pacer
        self._free_prefix = free_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(self._free_prefix):
            await self._pacer.turn()
        await self._app(scope, receive, send)


class PacedListener:
    """Accepts connections on a socket, a few in each turn of the loop. Closed like asyncio's servers.

    What the system is short of (descriptors, memory) ends nothing: acceptance goes on after `retry_s`.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        retry_s: float = _RETRY_ACCEPT_S,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._retry_s = retry_s
        self._retry: asyncio.TimerHandle | None = None
        self._last_errno: int | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._listen()

    def close(self) -> None:
        """Accept no more connections, and let go of those that are not served yet."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        for serving in self._serving:
            serving.cancel()

    async def wait_closed(self) -> None:
        if self._serving:
            await asyncio.wait(self._serving)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept connections that are there; called in every turn of the loop in which there are any."""
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # no more, or one has left again
            except OSError as error:
                self._pause(error)
                return
            self._last_errno = None
            serving = self._loop.create_task(self._serve(connection))
            self._serving.add(serving)
            serving.add_done_callback(partial(self._on_served, connection))

    def _pause(self, error: OSError) -> None:
        """The socket stays readable, so that trying again at once would take all of the loop's time."""
        if error.errno != self._last_errno:
            logger.warning("no connection can be accepted: %s", error)
        self._last_errno = error.errno
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(self._retry_s, self._listen)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        await self._loop.connect_accepted_socket(self._make_protocol, connection)

    def _on_served(self, connection: socket.socket, serving: asyncio.Task[None]) -> None:
        """One connection that cannot be served must not end the acceptance of all others."""
        self._serving.discard(serving)
        if serving.cancelled():
            connection.close()
        elif (error := serving.exception()) is not None:
            connection.close()
            if not isinstance(error, OSError):  # else it was closed in between
                logger.error("a connection could not be served", exc_info=error)
