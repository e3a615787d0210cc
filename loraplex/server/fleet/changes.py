"""Changes of a fleet's replicas, made one at a time; none outlives the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from loraplex.core.errors import EngineClosedError
from loraplex.server.engine_status import SHUTTING_DOWN


class Changes:
    """The changes that are in progress or wait for their turn. For use in one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def run(self, change: Coroutine[Any, Any, None]) -> None:
        """Run a change when it is its turn. It is cancelled with the caller.

        Raises EngineClosedError if the fleet is closed before it is done: a replica that was just starting is
        not yet a member that would be closed with the others.
        """
        task = asyncio.create_task(self._run(change))
        self._tasks.add(task)
        try:
            await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._is_closed and not (caller is not None and caller.cancelling()):
                raise EngineClosedError(SHUTTING_DOWN) from None
            raise
        finally:
            self._tasks.discard(task)

    async def _run(self, change: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._turn:
                if self._is_closed:
                    raise EngineClosedError(SHUTTING_DOWN)
                await change
        finally:
            change.close()  # it may never have been started

    async def close(self) -> None:
        """Cancel all changes, and wait until they have cleaned up. Idempotent."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
