"""An EngineClient around the fake core's process, for tests to drive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from fake_core import CHILD_ENV, FACTORY, FakeOptions

from loraplex.core.clock import ManualClock
from loraplex.core.request import EngineRequest
from loraplex.server.engine_client import ClientOptions, EngineClient
from loraplex.server.engine_status import EngineState
from loraplex.server.restart_policy import RestartPolicy

WAIT_S = 120.0
QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, max_crashes=100)

both_loops = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


def run(
    scenario: Coroutine[Any, Any, None],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await scenario

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(bounded())


def client_of(
    config: FakeOptions | None = None, clock: ManualClock | None = None, **options: Any
) -> EngineClient:
    settings = {"restart": QUICK, "stats_max_age_s": 0.0, "env": CHILD_ENV, **options}
    return EngineClient(
        config or FakeOptions(), factory=FACTORY, options=ClientOptions(**settings), clock=clock
    )


@asynccontextmanager
async def running(config: FakeOptions | None = None, **options: Any) -> AsyncIterator[EngineClient]:
    client = client_of(config, **options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def tokens(client: EngineClient, request: EngineRequest) -> tuple[int, ...]:
    return tuple([token async for output in client.generate(request) for token in output.token_ids])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll for a condition in another process that sends no notification; `run` bounds the time."""
    while not await condition():
        await asyncio.sleep(0.01)


def pid_of(client: EngineClient) -> int:
    pid = client.status.pid
    assert pid is not None
    return pid


async def wait_for_state(client: EngineClient, state: EngineState) -> None:
    async def reached() -> bool:
        return client.status.state is state

    await until(reached)
