"""Replicas that join, leave and are replaced while others serve, one change at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from loraplex.core.errors import EngineClosedError, InvalidRequestError, LoraplexError
from loraplex.server.fleet.adapter_memory import AdapterMemory
from loraplex.server.fleet.changes import Changes
from loraplex.server.fleet.fleet_adapters import FleetAdapters
from loraplex.server.fleet.fleet_setup import MAX_REPLICAS, FleetSetup
from loraplex.server.fleet.fleet_start import Deferred
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members
from loraplex.server.fleet.revival import Revival

logger = logging.getLogger(__name__)

_LEAVING_S: Final = 0.02
"""Seconds between checks whether a leaving replica has requests left."""


class ReplicaChanges:
    """Changes the members of a fleet. `routing`: None until the fleet has started. `revival`: restarts failed
    replicas."""

    def __init__(
        self,
        setup: FleetSetup,
        members: Members,
        adapters: FleetAdapters,
        memory: AdapterMemory,
        place: Callable[[], None],
    ) -> None:
        """`place`: called when a replica has joined."""
        self._setup = setup
        self._members = members
        self._adapters = adapters
        self._memory = memory
        self._place = place
        self._queue = Changes()
        self.revival = Revival(members, setup.clock, self._start_anew, setup.retry_s)
        self.routing: LiveRouting | None = None

    async def close(self) -> None:
        """Cancel changes that are in progress or wait for their turn."""
        await self._queue.close()

    async def scale(self, num_replicas: int, *, move: bool = False) -> None:
        """Change the number of replicas; return when they serve. Those with the highest numbers leave after
        their requests have ended; with `move`, others continue these requests.

        Raises InvalidRequestError for an impossible number, and LoraplexError if a new replica cannot start;
        those that serve continue.
        """
        self._check_size(num_replicas)
        await self._queue.run(self._scale(num_replicas, move=move))

    async def _scale(self, num_replicas: int, *, move: bool) -> None:
        present = self._members.present
        missing = [number for number in range(num_replicas) if number not in present]
        for number in missing[: max(num_replicas - len(present), 0)]:
            await self._join(number)
        try:
            with self._members.leaving(present[num_replicas:]) as leaving:
                await asyncio.gather(*(self._leave(number, move=move) for number in leaving))
        finally:
            # Not earlier: a failed replica may be planned again until it is closed.
            self.revival.forget()

    async def restart(self, number: int, *, move: bool = False) -> None:
        """Replace a replica by a new one after its requests have ended, while the others serve. With `move`,
        the others continue these requests.

        Raises as `drain` does, also if this fleet cannot restart replicas, and LoraplexError if the new one
        cannot start, which is tried again later.
        """
        self._members.check_there(number)
        if (why := self._setup.no_restart) is not None:
            raise InvalidRequestError(f"replica {number} is not restarted: {why}", param="replica")
        await self._queue.run(self._restart(number, move=move))

    async def _restart(self, number: int, *, move: bool) -> None:
        was_drained = self._members.is_drained(number)
        with self._members.replacing(number):
            with self._members.leaving([number]):
                await self._leave(number, move=move)
            try:
                await self._join(number)
            except EngineClosedError:
                raise
            except LoraplexError as error:
                self.revival.plan(number, str(error))
                raise LoraplexError(
                    f"replica {number} has left, and the new one did not start: {error}; it is tried again "
                    "from time to time, and at once by `loraplex fleet scale` with the number of replicas "
                    "that there are to be"
                ) from error
        if was_drained:
            self._members.drain(number)

    async def _start_anew(self, number: int) -> None:
        """Restart a replica when it is its turn. A server is checked before that: one that accepts
        connections but stays silent must not block other changes of the fleet."""
        if (look := self._setup.look) is not None:
            try:
                await look(number)
            except LoraplexError as error:
                if self.revival.is_planned(number):  # else the plan was dropped meanwhile
                    if self._members.lost.get(number) != str(error):
                        logger.warning("replica %d cannot join the fleet yet: %s", number, error)
                    self.revival.plan(number, str(error))
                raise
        await self._queue.run(self._revive(number))

    async def _revive(self, number: int) -> None:
        """Restart a replica, unless its plan was dropped before its turn."""
        if self.revival.is_planned(number):
            await self._restart(number, move=False)

    async def _join(self, number: int) -> None:
        """Start a replica with all adapters, and send it requests."""
        assert self.routing is not None
        replica = self._setup.make(number)
        joining = self._adapters.joining(replica, self._setup.num_loads_at_once)
        try:
            await replica.start(None, Deferred(joining.catch_up))
            await joining.catch_up()  # with adapters added while it prepared
        except BaseException as error:
            if isinstance(error, Exception):  # logged too, because the caller may have disconnected
                logger.error("replica %d could not join the fleet: %s; the others serve on", number, error)
            await replica.close()
            raise
        # No other task has run since it was up to date.
        assert replica.info is not None
        self._members.put(number, replica)
        self.routing.join(number, self._setup.limits(replica.info))
        self._place()

    async def _leave(self, number: int, *, move: bool) -> None:
        """Close a replica that gets no more requests, after those it has."""
        assert self.routing is not None
        while self.routing.num_in_flight(number):
            if move:  # repeatedly: some may have waited for it to be ready
                self._members[number].hand_over()
            await asyncio.sleep(_LEAVING_S)
        await self._members[number].close()
        self._memory.forget(number)

    def _check_size(self, num_replicas: int) -> None:
        most, why = self._setup.most or (MAX_REPLICAS, "more are not managed by one front")
        if num_replicas < 1:
            raise InvalidRequestError("a fleet has one replica at least", param="replicas")
        if num_replicas > most:
            raise InvalidRequestError(f"there can be {most} replicas at most: {why}", param="replicas")
