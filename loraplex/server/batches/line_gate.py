"""Decides when the next line of a batch may start: the engine always has work, and live requests a free way.

Lines are sent while few requests wait for their first token, live or of a batch. So as many run as the engine
takes, a queue of live requests stops further lines, and the limits on waiting requests are never reached. In
the engine's queue, lines come after all live requests, and give way to them (`core.tenants.BATCH_PRIORITY`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from loraplex.server.batches.line_call import LineCall
from loraplex.server.waiting import WaitingBook

_WAITING_PER_REPLICA: Final = 16
_SHARE_OF_PLACES: Final = 1 / 8
_MAX_IN_FLIGHT: Final = 1024


def most_waiting(num_replicas: int, max_requests: int) -> int:
    """Return how many requests may wait at most when a line is sent."""
    return max(min(_WAITING_PER_REPLICA * num_replicas, int(_SHARE_OF_PLACES * max_requests)), 1)


class LineGate:
    """The lines in flight of all batches of a server."""

    def __init__(self, waiting: WaitingBook, num_replicas: Callable[[], int]) -> None:
        self._waiting = waiting
        self._num_replicas = num_replicas
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._in_flight: set[int] = set()
        self._unstarted: list[LineCall] = []
        waiting.on_leave = self._changed.set

    async def enter(self, call: LineCall) -> None:
        """Wait until a call may be sent; batches take turns. `leave` must follow."""
        async with self._turn:
            while not self._has_place():
                self._changed.clear()
                await self._changed.wait()
            self._in_flight.add(id(call))
            self._unstarted.append(call)

    def leave(self, call: LineCall) -> None:
        self._in_flight.discard(id(call))
        self._unstarted = [each for each in self._unstarted if each is not call]
        self._changed.set()

    def _has_place(self) -> bool:
        if len(self._in_flight) >= _MAX_IN_FLIGHT:
            return False
        self._unstarted = [each for each in self._unstarted if each.waits]
        # Some of them may not have been counted by the book yet.
        num_waiting = max(self._waiting.num_requests, len(self._unstarted))
        return num_waiting < most_waiting(self._num_replicas(), self._waiting.max_requests)
