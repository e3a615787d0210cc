"""Waits for a server that is given up."""

from __future__ import annotations

import asyncio

import pytest
from replicas import run

from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineDeadError
from loraplex.server.fleet.liveness import Liveness


def test_a_wait_that_is_just_being_ended_does_not_keep_the_others_waiting() -> None:
    async def scenario() -> None:
        liveness, waits = Liveness(ManualClock()), []

        async def wait() -> None:
            async with liveness.waiting(liveness.era) as timeout:
                waits.append(timeout)
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(wait()) for _ in range(3)]
        while len(waits) < 3:
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        given_up: asyncio.Future[None] = loop.create_future()

        def give_up() -> None:
            try:
                assert waits[0].expired()  # it has ended, but its task has not run yet
                liveness.give_up(EngineDeadError("the server is away"))
                given_up.set_result(None)
            except Exception as error:
                given_up.set_exception(error)

        waits[0].reschedule(loop.time())
        loop.call_soon(give_up)
        await given_up
        for task in tasks:
            with pytest.raises(EngineDeadError, match="the server is away"):
                await task

    run(scenario())
