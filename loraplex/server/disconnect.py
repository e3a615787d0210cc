"""Work that ends when its client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

from loraplex.server.pacing import Pacer


async def run_until_disconnect(work: Coroutine[Any, Any, None], receive: Receive, pacer: Pacer) -> None:
    """Run `work`; cancel it if the client goes away. The request's body must have been read.

    Where many clients go at once, their work is cancelled at the pace of `pacer`.
    """
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await pacer.turn()
        if working.done():
            await working  # raises what it raised
    finally:
        working.cancel()
        listening.cancel()
        # Waited for, so that the engine has been told before this request is forgotten.
        await asyncio.gather(working, listening, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
