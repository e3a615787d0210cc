"""Split bursts into small portions, so that the event loop keeps serving everybody else.

Two thousand simultaneous requests are seconds of work, during which no stream would get a token. So in each
iteration of the loop only a few connections are accepted, only a few requests begin or are torn down, and
input is parsed for only half a millisecond; between iterations the loop polls its sockets and timers. Health
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
"""Number of requests that begin or are torn down per iteration of the loop; each takes up to a
millisecond."""
_ACCEPTED_PER_TURN: Final = 8
_WORK_PER_TURN_S: Final = 0.0005
_RETRY_ACCEPT_S: Final = 0.1


class Pacer:
    """Lets a few callers pass in each iteration of the event loop, first come first served."""

    def __init__(self, per_turn: int = _PER_TURN) -> None:
        self._per_turn = per_turn
        self._num_passed = 0  # in this iteration
        self._is_counting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait until the caller may pass: at once, or in a later iteration of the loop."""
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
            if not waiter.done():  # else the caller was cancelled
                waiter.set_result(None)
                self._num_passed += 1
        self._is_counting = self._num_passed > 0
        if self._is_counting:
            loop.call_soon(self._next_turn, loop)


class SlicedWork:
    """Runs many pieces of work in slices, for a short time in each iteration of the event loop.

    Work is a callable that does one slice and returns whether there is more. First slices go first, urgent
    ones before the others, so that short work does not wait behind long work; the remaining slices take
    turns. No queue starves: each iteration begins with one slice from each.
    """

    def __init__(self, clock: Clock, *, per_turn_s: float = _WORK_PER_TURN_S) -> None:
        self._clock = clock
        self._per_turn_s = per_turn_s
        self._left_s = per_turn_s  # of this iteration
        self._is_counting = False
        self._urgent: deque[Callable[[], bool]] = deque()
        self._first: deque[Callable[[], bool]] = deque()
        self._rest: deque[Callable[[], bool]] = deque()

    def do(self, work: Callable[[], bool], *, urgent: bool = False) -> None:
        """Begin at once if there is time left in this iteration, and continue in later ones."""
        (self._urgent if urgent else self._first).append(work)
        self._do_slices()
        self._count()

    def do_later(self, work: Callable[[], bool]) -> None:
        """Begin in the next iteration at the earliest."""
        self._rest.append(work)
        self._count()

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_counting = False
        self._left_s = self._per_turn_s
        for waiting in (self._urgent, self._rest, self._first):  # no queue may starve
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
    """Begins a few requests in each iteration of the loop, except those that must be answered at any time."""

    def __init__(self, app: ASGIApp, *, pacer: Pacer, free_prefix: str = "/health") -> None:
        self._app = app
        self._pacer = pacer
        self._free_prefix = free_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(self._free_prefix):
            await self._pacer.turn()
        await self._app(scope, receive, send)


class PacedListener:
    """Accepts connections on a socket, a few in each iteration of the loop. Closed like asyncio's servers.

    A shortage in the system (descriptors, memory) ends nothing: accepting resumes after `retry_s` seconds.
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
        """Accept no more connections, and drop those that are not served yet."""
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
        """Accept pending connections; called in every iteration of the loop in which there are any."""
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # none is left, or the client has disconnected
            except OSError as error:
                self._pause(error)
                return
            self._last_errno = None
            serving = self._loop.create_task(self._serve(connection))
            self._serving.add(serving)
            serving.add_done_callback(partial(self._on_served, connection))

    def _pause(self, error: OSError) -> None:
        """Stop accepting for a while. The socket stays readable, so retrying at once would keep the loop
        busy."""
        if error.errno != self._last_errno:
            logger.warning("no connection can be accepted: %s", error)
        self._last_errno = error.errno
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(self._retry_s, self._listen)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        await self._loop.connect_accepted_socket(self._make_protocol, connection)

    def _on_served(self, connection: socket.socket, serving: asyncio.Task[None]) -> None:
        """Clean up after a connection was set up. One that fails must not stop the acceptance of others."""
        self._serving.discard(serving)
        if serving.cancelled():
            connection.close()
        elif (error := serving.exception()) is not None:
            connection.close()
            if not isinstance(error, OSError):  # else it was closed meanwhile
                logger.error("a connection could not be served", exc_info=error)
