"""Run work that ends when its client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from loraplex.server.pacing import Pacer

T = TypeVar("T")


async def run_until_disconnect(work: Coroutine[Any, Any, T], receive: Receive, pacer: Pacer) -> T:
    """Return the result of `work`; if the client disconnects first, cancel it and raise ClientDisconnect.

    The request's body must have been read. If many clients disconnect at once, their work is cancelled at the
    pace of `pacer`.
    """
    # The work runs in the caller's task: a new task would begin one iteration of the event loop later.
    task = asyncio.current_task()
    assert task is not None
    num_cancelling = task.cancelling()
    watch = _Watch(task, receive, pacer)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.has_cancelled and task.uncancel() <= num_cancelling:
            raise ClientDisconnect from None
        raise  # the server itself cancelled the request
    finally:
        watch.end()


class _Watch:
    """Cancels a task when its client disconnects. It begins when the task first waits: many tasks have ended
    by then."""

    def __init__(self, task: asyncio.Task[Any], receive: Receive, pacer: Pacer) -> None:
        self._task = task
        self._receive = receive
        self._pacer = pacer
        self._watching: asyncio.Task[None] | None = None
        self._begin = asyncio.get_running_loop().call_soon(self._watch)
        self.has_cancelled = False

    def end(self) -> None:
        self._begin.cancel()
        if self._watching is not None:
            self._watching.cancel()

    def _watch(self) -> None:
        self._watching = asyncio.create_task(self._cancel_on_disconnect())

    async def _cancel_on_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        await self._pacer.turn()
        self.has_cancelled = True
        self._task.cancel()
