"""Work that ends when its client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from loraplex.server.pacing import Pacer

T = TypeVar("T")


async def run_until_disconnect(work: Coroutine[Any, Any, T], receive: Receive, pacer: Pacer) -> T:
    """Return what `work` returns; if the client goes away first, cancel it and raise ClientDisconnect.

    The request's body must have been read. Where many clients go at once, their work is cancelled at the
    pace of `pacer`.
    """
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await pacer.turn()
        if not working.done():
            raise ClientDisconnect
        return await working  # or raises what it raised
    finally:
        working.cancel()
        listening.cancel()
        # Waited for, so that the engine has been told before this request is forgotten.
        await asyncio.gather(working, listening, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
