"""A single engine process that dies: its streams wait for the restarted one, and continue there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fake_core
import pytest
from engine_client_harness import QUICK, pid_of, run, wait_for_state
from fake_core import CHILD_ENV, FACTORY, FakeOptions, request_of, spec_of, tokens_of

from loraplex.core import errors
from loraplex.core.request import EngineOutput
from loraplex.server.continuing import Continued
from loraplex.server.engine_client import ClientOptions
from loraplex.server.engine_status import EngineState
from loraplex.server.restart_policy import RestartPolicy
from loraplex.server.sole_engine import SoleEngine


@asynccontextmanager
async def running(
    config: FakeOptions | None = None, restart: RestartPolicy = QUICK, ready_timeout_s: float = 60.0
) -> AsyncIterator[SoleEngine]:
    options = ClientOptions(restart=restart, env=CHILD_ENV, ready_timeout_s=ready_timeout_s)
    engine = SoleEngine(config or FakeOptions(), factory=FACTORY, options=options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def kill(engine: SoleEngine) -> None:
    os.kill(pid_of(engine), signal.SIGKILL)


async def first_tokens(stream: AsyncGenerator[EngineOutput, None]) -> list[int]:
    found: list[int] = []
    while not found:
        found += (await anext(stream)).token_ids
    return found


async def rest(stream: AsyncGenerator[EngineOutput, None]) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


def test_streams_wait_for_the_restart_and_go_on() -> None:
    async def scenario() -> None:
        async with running() as engine:
            await engine.add_adapter(spec_of("v1"))
            requests = [
                request_of(f"r{number}", prompt=number, max_tokens=20_000, adapter=["v1", None][number % 2])
                for number in range(6)
            ]
            streams = [engine.generate(request) for request in requests]
            begun = [await first_tokens(stream) for stream in streams]
            kill(engine)
            ended = await asyncio.gather(*map(rest, streams))
            for request, first, last in zip(requests, begun, ended, strict=True):
                assert (*first, *last) == tokens_of(request)
            assert engine.status.num_restarts == 1
            assert engine.continued == {Continued.DIED: 6}

    run(scenario())


def test_a_request_that_waited_in_the_queue_is_served_after_the_restart() -> None:
    async def scenario() -> None:
        async with running() as engine:
            stream = engine.generate(request_of("silent", fake_core.SILENT))
            assert not (await anext(stream)).token_ids
            kill(engine)
            waiting = asyncio.create_task(anext(stream))
            await wait_for_state(engine, EngineState.RESTARTING)
            await wait_for_state(engine, EngineState.READY)
            while (await engine.stats()).num_running != 1:
                await asyncio.sleep(0.01)
            assert not waiting.done(), "that it is queued is told once"
            waiting.cancel()

    run(scenario())


def test_a_request_that_kills_the_engine_is_given_up_before_the_server_is() -> None:
    async def scenario() -> None:
        async with running() as engine:
            with pytest.raises(
                errors.EngineDeadError, match="2 engine processes died or fell silent one after the other"
            ):
                await rest(engine.generate(request_of("poison", fake_core.KILL)))
            request = request_of("after", max_tokens=4)
            assert tuple(await rest(engine.generate(request))) == tokens_of(request)
            assert not engine.failed.is_set()

    run(scenario())


def test_a_stream_ends_with_the_reason_when_there_is_no_restart() -> None:
    async def scenario() -> None:
        never = RestartPolicy(max_crashes=0)
        async with running(restart=never) as engine:
            stream = engine.generate(request_of("long", fake_core.ENDLESS, max_tokens=1 << 30))
            await first_tokens(stream)
            kill(engine)
            with pytest.raises(errors.EngineDeadError, match="died too often and is not started again"):
                await rest(stream)

    run(scenario())


def test_a_stream_waits_no_longer_than_a_new_request_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        marker = tmp_path / "hang"
        async with running(
            FakeOptions(start_fault="hang", fault_marker=marker), ready_timeout_s=0.05
        ) as engine:
            stream = engine.generate(request_of("long", fake_core.ENDLESS, max_tokens=1 << 30))
            await first_tokens(stream)
            marker.touch()
            kill(engine)
            with pytest.raises(errors.EngineDeadError, match="it is not ready yet, try again later"):
                await rest(stream)

    run(scenario())


def test_a_stream_that_waits_for_a_restart_ends_with_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        marker = tmp_path / "hang"
        async with running(FakeOptions(start_fault="hang", fault_marker=marker)) as engine:
            stream = engine.generate(request_of("long", fake_core.ENDLESS, max_tokens=1 << 30))
            await first_tokens(stream)
            marker.touch()
            kill(engine)
            waiting = asyncio.create_task(rest(stream))
            await wait_for_state(engine, EngineState.RESTARTING)
            await engine.close()
            with pytest.raises(errors.EngineClosedError):
                await waiting

    run(scenario())
