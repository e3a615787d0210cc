"""Work that ends when its client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def run_until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`; cancel it at once if the client goes away. The request's body must have been read."""
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
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
