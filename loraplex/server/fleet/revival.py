"""Replicas that were given up, as they died too often, or whose restart failed, are started anew later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.errors import LoraplexError
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.members import Members

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
RETRY_S: Final = (60.0, 900.0)
"""The pause before a replica that has failed is started anew, and the longest."""


@dataclass(frozen=True, slots=True)
class _Try:
    """`pause_s`: before it."""

    at_s: float
    pause_s: float


class Revival:
    """Starts replicas anew some time after they have failed, and longer each time that comes to nothing. When
    all have failed it does nothing: then the fleet itself has, and whoever supervises it acts."""

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

    def forget(self) -> None:
        """Plan nothing: somebody has just said which replicas there are to be."""
        self._tries.clear()
        self._members.lost.clear()

    def plan(self, number: int, reason: str) -> None:
        """Start a replica anew after the first pause, or when it is planned already: it has left to be
        replaced, and the new one did not start, for this reason."""
        self._members.lost[number] = reason
        self._tries.setdefault(number, _Try(self._clock.now_s() + self._first_s, self._first_s))

    def is_planned(self, number: int) -> bool:
        return number in self._tries

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Plan for those that have failed, and start those anew whose time has come."""
        now_s = self._clock.now_s()
        for number, replica in enumerate(self._members):
            if replica.healthy:
                self._tries.pop(number, None)
            elif replica.status.state is EngineState.FAILED and number not in self._tries:
                logger.warning("replica %d was given up; it is started anew in %g s", number, self._first_s)
                self._tries[number] = _Try(now_s + self._first_s, self._first_s)
        for number, planned in list(self._tries.items()):
            if now_s >= planned.at_s and not self._members.is_gone:
                await self._try(number, planned)

    async def _try(self, number: int, planned: _Try) -> None:
        try:
            await self._start_anew(number)
        except LoraplexError:  # which the fleet has logged
            pause_s = min(2 * planned.pause_s, self._most_s)
            if number in self._tries:  # else somebody has decided otherwise meanwhile
                self._tries[number] = _Try(self._clock.now_s() + pause_s, pause_s)
        else:
            self._tries.pop(number, None)
