"""Watch the registry for changes that other servers on the state folder make, and follow them name by
name."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from loraplex.core.errors import StorageError
from loraplex.server.registry_follower import RegistryFollower

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.5
_RETRY_S: Final = 30.0
"""Seconds between retries of changes that could not be followed: a file may come back, or an engine."""
_NUM_AT_ONCE: Final = 4


class RegistryWatch:
    """Checks the registry every half second. Without changes this costs next to nothing; names are compared
    only if something changed."""

    def __init__(self, follower: RegistryFollower) -> None:
        self._follower = follower
        self._registered = follower.registered
        self._gate = asyncio.Semaphore(_NUM_AT_ONCE)
        self._under_way: set[str] = set()
        self._is_due = True  # names may differ, whatever the registry's counter says
        self._trouble: str | None = None

    async def run(self) -> None:
        """Watch until cancelled. No failure of the registry ends this."""
        loop = asyncio.get_running_loop()
        next_retry_s = loop.time() + _RETRY_S
        async with asyncio.TaskGroup() as group:
            while True:
                names = await self._look()
                if loop.time() >= next_retry_s:
                    next_retry_s = loop.time() + _RETRY_S
                    names += [name for name in self._registered.lagging() if name not in names]
                for name in names:
                    if name not in self._under_way:
                        self._under_way.add(name)
                        group.create_task(self._follow(name), name=f"follow {name}")
                await asyncio.sleep(INTERVAL_S)

    async def _look(self) -> list[str]:
        """Return the names that have changed."""
        registry = self._registered.registry
        try:
            if not await asyncio.to_thread(registry.has_changed) and not self._is_due:
                return []
            self._is_due = False
            names = self._registered.changed_elsewhere(await asyncio.to_thread(registry.states))
        except Exception as error:  # keep serving, whatever is wrong with the folder
            self._report(error)
            return []
        # A name that is being changed or followed right now may have to be checked again.
        self._is_due = any(name in self._under_way for name in names)
        return names

    async def _follow(self, name: str) -> None:
        try:
            async with self._gate:
                if not await self._follower.follow(name):
                    self._is_due = True
        except Exception as error:
            self._report(error)
        finally:
            self._under_way.discard(name)

    def _report(self, error: Exception) -> None:
        """Log a failure, but not the same one at every check, and have names compared again."""
        self._is_due = True
        if str(error) != self._trouble:
            self._trouble = str(error)
            bug = None if isinstance(error, StorageError) else error
            logger.warning("changes by other servers on the state folder are missed: %s", error, exc_info=bug)
