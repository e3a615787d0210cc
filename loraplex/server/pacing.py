"""Bursts in small portions: what many clients do at once leaves the event loop a turn for everybody else.

Two thousand requests in one moment are seconds of work, and no stream gets a token meanwhile. So only a few
connections are accepted, and only a few requests begin or are torn down, in each turn of the loop; between
two turns the loop looks at its sockets and timers. Health checks do not queue.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

_PER_TURN: Final = 4
"""Requests that begin or are torn down in one turn of the loop; each takes up to a millisecond."""
_ACCEPTED_PER_TURN: Final = 16
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
    """Accepts connections on a socket, a few in each turn of the loop. Closed like asyncio's servers."""

    def __init__(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._accepting = asyncio.create_task(self._accept(), name="accept")

    def close(self) -> None:
        """Accept no more connections."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._accepting])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        last_errno: int | None = None
        while True:
            try:
                connections = [(await loop.sock_accept(self._listener))[0]]
                connections += self._more(_ACCEPTED_PER_TURN - 1)
            except OSError as error:  # no descriptors or memory, or the client has left again
                if error.errno != last_errno:
                    logger.warning("no connection can be accepted: %s", error)
                last_errno = error.errno
                await asyncio.sleep(_RETRY_ACCEPT_S)
                continue
            last_errno = None
            for connection in connections:
                await self._serve(loop, connection)

    def _more(self, limit: int) -> list[socket.socket]:
        """Further connections that are there already."""
        found: list[socket.socket] = []
        while len(found) < limit:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none is there; what is wrong otherwise shows at the next turn
                break
            found.append(connection)
        return found

    async def _serve(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await loop.connect_accepted_socket(self._make_protocol, connection)
        except Exception as error:  # one connection must not end the acceptance of all others
            connection.close()
            if not isinstance(error, OSError):  # else it was closed in between
                logger.exception("a connection could not be served")
