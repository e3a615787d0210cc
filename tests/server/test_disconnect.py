"""Work that ends with its client: the exception depends on who ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from loraplex.server.disconnect import run_until_disconnect
from loraplex.server.pacing import Pacer


class Client:
    """A client that leaves when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.num_asked = 0

    async def receive(self) -> dict[str, Any]:
        self.num_asked += 1
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_work_is_cancelled_when_its_client_leaves_and_its_task_goes_on() -> None:
    async def scenario() -> None:
        client, cleaned_up = Client(), asyncio.Event()

        async def work() -> None:
            client.left.set()
            try:
                await asyncio.Event().wait()
            finally:
                cleaned_up.set()

        with pytest.raises(ClientDisconnect):
            await run_until_disconnect(work(), client.receive, Pacer())
        assert cleaned_up.is_set()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # nothing is left that would cancel it

    asyncio.run(scenario())


def test_what_the_server_cancels_is_cancelled() -> None:
    async def scenario() -> None:
        began = asyncio.Event()

        async def work() -> None:
            began.set()
            await asyncio.Event().wait()

        running = asyncio.create_task(run_until_disconnect(work(), Client().receive, Pacer()))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())


def test_nobody_listens_for_a_client_whose_work_does_not_wait() -> None:
    async def scenario() -> None:
        client = Client()

        async def work() -> int:
            return 7

        assert await run_until_disconnect(work(), client.receive, Pacer()) == 7
        for _ in range(3):
            await asyncio.sleep(0)
        assert client.num_asked == 0

    asyncio.run(scenario())


def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    async def scenario() -> None:
        async def work() -> None:
            await asyncio.sleep(0)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await run_until_disconnect(work(), Client().receive, Pacer())

    asyncio.run(scenario())
