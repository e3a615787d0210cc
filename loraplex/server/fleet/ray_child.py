"""The front's handle on an engine process that a Ray actor has started, on this or another machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

from loraplex.core.errors import EngineDeadError, LoraplexError, ModelError, UserError
from loraplex.server.engine_child import EngineHandle, launch_of
from loraplex.server.engine_sockets import Socket
from loraplex.server.fleet.ray_cluster import RayCluster, Seat
from loraplex.server.fleet.ray_messages import Placed, Resources
from loraplex.server.protocol_ipc import ErrorInfo, Event, Failed, Shutdown, has_message
from loraplex.server.remote_sockets import RemoteSockets

logger = logging.getLogger(__name__)

_REACH_S: Final = 30.0
"""Seconds that an engine process may take to connect: Python's start, and the network."""
_LAST_WORDS_S: Final = 0.5
"""Seconds that Ray may take to report how it ended, after its connection was cut."""


class RayChild(EngineHandle):
    """An engine process on a Ray cluster. Creating this returns at once; placing and starting go on in the
    background."""

    def __init__(
        self,
        cluster: RayCluster,
        replica: int,
        *,
        factory: str,
        config: object,
        resources: Resources,
        wait_s: float,
        on_event: Callable[[Event], None],
    ) -> None:
        """`wait_s`: seconds that the place may take to become free."""
        super().__init__(on_event)
        self._cluster = cluster
        self._replica = replica
        self._factory, self._config = factory, config
        self._resources, self._wait_s = resources, wait_s
        self._sockets: RemoteSockets | None = None
        self._cut_signal: Socket | None = None
        self._cut = asyncio.Event()
        self._reached = asyncio.Event()
        self._seat: Seat | None = None
        self._placed: Placed | None = None
        self._life = asyncio.create_task(self._live(), name=f"ray-replica-{replica}")

    @property
    def pid(self) -> int | None:
        return None if self._seat is None else self._seat.pid

    @property
    def node(self) -> str | None:
        return None if self._placed is None else self._placed.host

    async def stop(self, *, grace_s: float) -> None:
        """See EngineHandle. Also releases its place."""
        try:
            self.send(Shutdown())
            if self.ready.done() and not self.ready.cancelled():
                await self.wait_exited(timeout_s=grace_s)
            # Otherwise it reads no commands while it loads, and ends with its actor.
            if self._seat is not None:
                self._seat.release()
                await self._seat.wait_released()
        finally:
            self._life.cancel()
            await asyncio.wait([self._life])
            if not self.exited.is_set():
                self._finish("its replica was closed")

    def kill(self, reason: str) -> None:
        """See EngineHandle. Its actor is killed with it; the next engine process is placed again."""
        self._failure = ErrorInfo(LoraplexError.__name__, reason)
        if self._seat is not None:
            self._seat.release()

    async def _live(self) -> None:
        """Place the engine process, start it, and report its end, whatever the cause."""
        try:
            reason = await self._run()
        except LoraplexError as error:
            self._finish(str(error), error)
        except Exception as error:
            logger.exception("replica %d could not be started", self._replica)
            self._finish(f"it could not be started: {error}")
        else:
            self._finish(reason)

    async def _run(self) -> str:
        """Run the engine process; return why it ended. Raises LoraplexError if it could not be placed or
        reached."""
        cluster = self._cluster
        about = await cluster.about(self._wait_s)
        self._sockets = RemoteSockets(self._context, about.host)
        self._listen(self._sockets.events)
        seat = self._seat = await cluster.place(self._replica, self._resources, self._wait_s)
        outcomes: list[asyncio.Future[Any]] = [seat.placed, seat.ended]
        await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        if not seat.placed.done():
            raise UserError(f"replica {self._replica} cannot be placed: {seat.ended.result()}")
        self._placed = seat.placed.result()
        self._sockets.admit(self._placed.public_key)
        launch = launch_of(self._factory, self._config, remote=self._sockets.remote)
        seat.run(msgspec.json.encode(launch).decode())
        await self._first_of(seat, self._reached, timeout_s=_REACH_S)
        if not self._reached.is_set() and not seat.ended.done():
            seat.release()
            raise EngineDeadError(
                f"the engine on node {self._placed.host} did not connect to {self._sockets.remote.events} "
                f"within {_REACH_S:g} s; let the nodes reach each other and this machine on all ports"
            )
        await self._first_of(seat, self._cut)
        if not seat.ended.done():
            await asyncio.wait([seat.ended], timeout=_LAST_WORDS_S)
        if not seat.ended.done():
            seat.release()  # it may be stopped, or still run unreachable
            return f"the connection to node {self._placed.host} was cut"
        return f"{seat.ended.result()}, on node {self._placed.host}"

    async def _first_of(self, seat: Seat, event: asyncio.Event, timeout_s: float | None = None) -> None:
        waiting = asyncio.create_task(event.wait())
        either: list[asyncio.Future[Any]] = [waiting, seat.ended]
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    def _connect_commands(self, address: str) -> Socket:
        assert self._sockets is not None
        commands, self._cut_signal = self._sockets.connect_commands(address)
        self._loop.add_reader(int(self._cut_signal.getsockopt(zmq.FD)), self._look_at_connection)
        self._look_at_connection()  # the descriptor only signals changes
        self._reached.set()
        return commands

    def _look_at_connection(self) -> None:
        if self._cut_signal is not None and has_message(self._cut_signal):
            self._cut.set()

    def _note(self, event: Event) -> None:
        if isinstance(event, Failed) and self._placed is not None:
            # Name the node whose files, memory or GPUs the error is about.
            error, message = event.error, f"on node {self._placed.host}: {event.error.message}"
            if error.kind == ModelError.__name__:
                message += " (nodes need the model's files under the same path)"
            event = Failed(ErrorInfo(kind=error.kind, message=message, param=error.param))
        super()._note(event)

    def _on_failure_reported(self) -> None:
        """Report the end without waiting for the exit, which follows by itself: this process cannot close its
        stdin. The actor starts no other engine process before that."""
        if self._seat is not None and self._failure is not None:
            self._seat.end(self._failure.message)

    def _release(self) -> None:
        if self._released:
            return
        if self._cut_signal is not None:
            self._loop.remove_reader(int(self._cut_signal.getsockopt(zmq.FD)))
        if self._sockets is not None:
            self._sockets.close()
        super()._release()
