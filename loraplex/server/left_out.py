"""Retry adapters that could not be read, or that the engine refused, when the server started.

Files may be repaired, and a fleet's servers may accept an adapter after they were restarted with another
option. A name that is loaded, unloaded or changed through another server meanwhile is not retried, even while
the other server's version is refused here.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from loraplex.core.errors import AdapterConflictError, LoraplexError
from loraplex.server.adapter_service import AdapterService
from loraplex.server.canary_startup import restore_canaries

logger = logging.getLogger(__name__)

RETRY_S: Final = 30.0


async def keep_retrying(service: AdapterService, period_s: float = RETRY_S) -> None:
    """Retry adapters that were left out every `period_s` seconds, until cancelled."""
    while True:
        await asyncio.sleep(period_s)
        try:
            await retry_left_out(service)
        except Exception:  # keep serving, and keep retrying
            logger.exception("adapters that were left out could not be tried again")


async def retry_left_out(service: AdapterService) -> None:
    """Serve adapters left out at the start, if they can be read and the engine accepts them by now."""
    for name in list(service.left_out):
        try:
            async with service.follower.change(name):
                await _retry(service, name)
        except AdapterConflictError:
            continue  # it is being changed right now
        except LoraplexError as error:
            if (left := service.left_out.get(name)) is not None:
                service.left_out[name] = replace(left, reason=str(error))


async def _retry(service: AdapterService, name: str) -> None:
    left = service.left_out.get(name)
    if left is None:
        return
    registered = service.registered
    if (why := registered.why_lagging(name)) is not None:
        # Another server has changed the name since, and that change is not served here yet: serving and
        # registering what was left out would undo it. The registry follower retries that change.
        service.left_out[name] = replace(left, reason=why)
        return
    found = await asyncio.to_thread(left.find)
    await service.adopt(found.adapter)
    logger.info("adapter %r is served now, which was left out at the start", name)
    canaries = {} if found.canary is None else {name: found.canary}
    missing = (await restore_canaries(service, canaries)).get(name)
    if missing is not None:
        logger.warning("%s", missing.note)
    served = service.get(name)
    if served is not None and found.origin is not None:
        await registered.put(served, found.origin, kept=None if missing is None else missing.kept)
        if missing is not None and missing.kept is not None:
            registered.lags(name, missing.reason)
