"""Signs of life of a server elsewhere, and a way to wake those who wait for it in vain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp

from loraplex.core.clock import Clock
from loraplex.core.errors import EngineDeadError


class Liveness:
    """Waits for a server without a limit of their own, which all end when the server is given up.

    A connection that is cut wakes its reader by itself. One to a machine that is gone, or to a process that
    is stopped, stays silent for ever: only whoever watches the server can tell, and calls `give_up`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: set[asyncio.Timeout] = set()
        self._readers: set[aiohttp.StreamReader] = set()
        self._reason: EngineDeadError | None = None
        self.era = 0
        """Changes whenever the server is given up."""
        self.heard_s = clock.now_s()
        """When the server sent anything last."""

    def heard(self) -> None:
        self.heard_s = self._clock.now_s()

    def give_up(self, reason: EngineDeadError) -> None:
        """End all waits that were begun so far with `reason`."""
        self.era += 1
        self._reason = reason
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():  # else it has been ended by itself, and is about to raise
                wait.reschedule(now)
        for reader in self._readers:
            reader.set_exception(self._error())
        self._waits.clear()
        self._readers.clear()

    @asynccontextmanager
    async def waiting(self, era: int) -> AsyncIterator[asyncio.Timeout]:
        """Wait for the server inside of this; raises the reason if it is given up, or was since `era`. Yields
        what this one wait can be ended by: then it raises TimeoutError."""
        self._check(era)
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                yield wait
        except TimeoutError:
            self._check(era)
            raise
        finally:
            self._waits.discard(wait)

    @contextmanager
    def reading(self, reader: aiohttp.StreamReader, era: int) -> Iterator[None]:
        """Read from the server inside of this, which costs nothing for each read."""
        self._check(era)
        self._readers.add(reader)
        try:
            yield
        finally:
            self._readers.discard(reader)

    def _check(self, era: int) -> None:
        if era != self.era:
            raise self._error()

    def _error(self) -> EngineDeadError:
        """A fresh error: one that is raised in many places would collect all their tracebacks."""
        assert self._reason is not None
        return type(self._reason)(str(self._reason))
