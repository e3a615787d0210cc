"""Signs of life of a server elsewhere, and a way to end waits when it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp

from loraplex.core.clock import Clock
from loraplex.core.errors import EngineDeadError


class Liveness:
    """Waits for a server that have no timeout, which all end when the server is given up.

    A cut connection wakes its reader by itself. A connection to a machine that is gone, or to a stopped
    process, stays silent forever: only the watch over the server detects that, and calls `give_up`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: set[asyncio.Timeout] = set()
        self._readers: set[aiohttp.StreamReader] = set()
        self._reason: EngineDeadError | None = None
        self.era = 0
        """Counter that grows whenever the server is given up."""
        self.heard_s = clock.now_s()
        """Time when the server last sent anything."""

    def heard(self) -> None:
        self.heard_s = self._clock.now_s()

    def give_up(self, reason: EngineDeadError) -> None:
        """End all waits begun so far with `reason`."""
        self.era += 1
        self._reason = reason
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():  # else it was ended individually, and is about to raise
                wait.reschedule(now)
        for reader in self._readers:
            reader.set_exception(self._error())
        self._waits.clear()
        self._readers.clear()

    @asynccontextmanager
    async def waiting(self, era: int) -> AsyncIterator[asyncio.Timeout]:
        """Wait for the server inside this context; raises the reason if it is given up, or was since `era`.
        Yields the timeout by which this single wait can be ended: it then raises TimeoutError."""
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
        """Read from the server inside this context, at no extra cost per read."""
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
        """Return a new error: one raised in many places would collect all their tracebacks."""
        assert self._reason is not None
        return type(self._reason)(str(self._reason))
