"""Restart replicas later that were given up because they died too often, or that did not start.

Each is tried in its own task, so that one that takes long to fail does not delay the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.errors import LoraplexError
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.members import Members

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
RETRY_S: Final = (60.0, 900.0)
"""The first and the longest pause in seconds before a failed replica is restarted."""


@dataclass(frozen=True, slots=True)
class _Try:
    """A planned restart. `pause_s`: the pause in seconds before it."""

    at_s: float
    pause_s: float


class Revival:
    """Restarts failed replicas after a pause, which doubles each time that fails. When all have failed it
    does nothing: then the fleet itself has failed, and its supervisor acts."""

    def __init__(
        self,
        members: Members,
        clock: Clock,
        start_anew: Callable[[int], Awaitable[None]],
        retry_s: tuple[float, float] = RETRY_S,
    ) -> None:
        self._first_s, self._most_s = retry_s
        self._members = members
        self._clock = clock
        self._start_anew = start_anew
        self._tries: dict[int, _Try] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of those being tried

    def forget(self) -> None:
        """Drop all plans, because an operator has just set the number of replicas. Replicas that did not
        start and are not closed are still shown with the reason."""
        self._tries.clear()
        for number in self._members.lost.keys() - set(self._members.present):
            del self._members.lost[number]

    def plan(self, number: int, reason: str) -> None:
        """Plan a restart after the first pause, unless one is planned already: for a replica that never
        started, or that left and whose replacement did not start, for this reason."""
        self._members.lost[number] = reason
        self._tries.setdefault(number, _Try(self._clock.now_s() + self._first_s, self._first_s))

    def is_planned(self, number: int) -> bool:
        return number in self._tries

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                self.look()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> list[asyncio.Task[None]]:
        """Plan restarts of failed replicas, and begin those that are due; return their tasks."""
        now_s = self._clock.now_s()
        for number, replica in enumerate(self._members):
            if replica.healthy:
                self._tries.pop(number, None)
            elif replica.status.state is EngineState.FAILED and number not in self._tries:
                logger.warning(
                    "replica %d cannot be used; it is asked again in %g s"
                    if self._members.are_servers
                    else "replica %d was given up; it is started anew in %g s",
                    *(number, self._first_s),
                )
                self._tries[number] = _Try(now_s + self._first_s, self._first_s)
        begun = []
        for number, planned in self._tries.items():
            if now_s >= planned.at_s and number not in self._tasks and not self._members.is_gone:
                task = self._tasks[number] = asyncio.create_task(self._try(number, planned))
                task.add_done_callback(partial(self._end, number))
                begun.append(task)
        return begun

    def _end(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]

    async def _try(self, number: int, planned: _Try) -> None:
        try:
            await self._start_anew(number)
        except Exception as error:
            if not isinstance(error, LoraplexError):  # the fleet has logged these
                logger.exception("replica %d could not be started anew; it is tried again", number)
            pause_s = min(2 * planned.pause_s, self._most_s)
            if number in self._tries:  # else the plan was dropped meanwhile
                self._tries[number] = _Try(self._clock.now_s() + pause_s, pause_s)
        else:
            self._tries.pop(number, None)
