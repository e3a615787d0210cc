"""The engine process as it starts, crashes, is restarted and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import fake_core
import pytest
from engine_client_harness import (
    QUICK,
    both_loops,
    client_of,
    pid_of,
    run,
    running,
    tokens,
    until,
    wait_for_state,
)
from fake_core import CHILD_ENV, FACTORY, FakeOptions, request_of, spec_of, tokens_of

from loraplex.core import errors
from loraplex.core.clock import ManualClock
from loraplex.core.request import EngineOutput
from loraplex.core.stats import EngineStats
from loraplex.server.engine_client import ClientOptions, EngineClient
from loraplex.server.engine_status import EngineState
from loraplex.server.protocol_ipc import StartProgress
from loraplex.server.restart_policy import RestartPolicy


@both_loops
def test_a_killed_engine_fails_its_requests_and_comes_back(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def scenario() -> None:
        async with running() as client:
            for version in ("v1", "v2"):
                await client.add_adapter(spec_of(version))
            await client.remove_adapter("v2")
            streams = [client.generate(request_of(f"r{i}", fake_core.ENDLESS)) for i in range(20)]
            for stream in streams:
                await anext(stream)
            first_pid = pid_of(client)
            os.kill(first_pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(
                    errors.EngineDeadError, match=r"killed by SIGKILL.*send the request again"
                ):
                    await _exhaust(stream)
            assert (client.healthy, client.status.state) == (False, EngineState.RESTARTING)
            assert "SIGKILL" in client.status.message
            assert await client.stats() == EngineStats()

            request = request_of("after", adapter="v1")
            assert await tokens(client, request) == tokens_of(request)
            assert client.healthy
            assert client.status.num_restarts == 1
            assert pid_of(client) != first_pid
            assert [adapter.version for adapter in (await client.stats()).adapters] == ["v1"]

    run(scenario(), loop_factory)


async def _exhaust(stream: AsyncIterator[EngineOutput]) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (fake_core.EXIT, "exit code 9"),
        (fake_core.KILL, "SIGKILL"),
        (fake_core.RAISE, "RuntimeError: the device fell off"),
    ],
)
def test_a_crash_in_a_step_tells_its_reason(prompt: int, reason: str) -> None:
    async def scenario() -> None:
        async with running() as client:
            waiting = asyncio.create_task(tokens(client, request_of("waits", fake_core.SILENT)))
            with pytest.raises(errors.EngineDeadError, match=reason):
                await tokens(client, request_of("bad", prompt))
            with pytest.raises(errors.EngineDeadError, match=reason):
                await waiting
            assert await tokens(client, request_of("good")) == tokens_of(request_of("good"))

    run(scenario())


def test_too_many_crashes_end_the_restarts_with_a_clear_state() -> None:
    async def scenario() -> None:
        policy = RestartPolicy(first_delay_s=0.01, max_crashes=2, window_s=60.0)
        async with running(restart=policy, clock=ManualClock()) as client:
            with pytest.raises(errors.EngineDeadError):
                await tokens(client, request_of("a", fake_core.EXIT))
            with pytest.raises(errors.EngineDeadError):
                await tokens(client, request_of("b", fake_core.EXIT))
            await wait_for_state(client, EngineState.FAILED)
            assert not client.healthy
            for call in (tokens(client, request_of("c")), client.add_adapter(spec_of("v1"))):
                with pytest.raises(errors.EngineDeadError, match=r"too often.*exit code 9"):
                    await call
            assert await client.stats() == EngineStats()

    run(scenario())


@pytest.mark.parametrize(("fault", "reason"), [("model", "no layers"), ("exit", "exit code 7")])
def test_restarts_that_fail_end_it_too(tmp_path: Path, fault: str, reason: str) -> None:
    async def scenario() -> None:
        marker = tmp_path / "fault"
        policy = RestartPolicy(first_delay_s=0.01, max_crashes=100, max_failed_starts=2)
        async with running(FakeOptions(start_fault=fault, fault_marker=marker), restart=policy) as client:
            marker.touch()
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.FAILED)
            assert reason in client.status.message
            assert client.status.num_restarts == 2

    run(scenario())


def test_a_request_does_not_wait_for_a_restart_forever(tmp_path: Path) -> None:
    async def scenario() -> None:
        marker = tmp_path / "fault"
        config = FakeOptions(start_fault="hang", fault_marker=marker)
        async with running(config, ready_timeout_s=0.01, stop_grace_s=1.0) as client:
            marker.touch()
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.RESTARTING)
            with pytest.raises(errors.EngineDeadError, match="not ready yet"):
                await tokens(client, request_of("a"))

    run(scenario())


@pytest.mark.parametrize(
    ("fault", "error_class", "message"),
    [
        ("model", errors.ModelError, "this model has no layers"),
        ("bug", errors.LoraplexError, "could not start: KeyError: 'lm_head'"),
        ("exit", errors.EngineDeadError, "while starting: exit code 7; the log says why"),
        ("killed", errors.EngineDeadError, "by SIGKILL; unless somebody killed it, memory ran out: lower"),
    ],
)
def test_a_failed_start_raises_what_the_child_said(
    fault: str, error_class: type[Exception], message: str
) -> None:
    async def scenario() -> None:
        client = client_of(FakeOptions(start_fault=fault))
        with pytest.raises(error_class, match=message):
            await client.start()
        assert client.status.state is EngineState.FAILED
        with pytest.raises(errors.EngineDeadError, match=message):
            await tokens(client, request_of("a"))
        await client.close()

    run(scenario())


def test_a_factory_that_does_not_exist_is_named() -> None:
    async def scenario() -> None:
        client = EngineClient(
            FakeOptions(), factory="no_such_module:build", options=ClientOptions(env=CHILD_ENV)
        )
        with pytest.raises(errors.LoraplexError, match="no_such_module"):
            await client.start()

    run(scenario())


def test_progress_is_reported_for_the_first_start_only() -> None:
    async def scenario() -> None:
        client = client_of(FakeOptions(phases=("weights", "warm-up")))
        seen: list[StartProgress] = []
        await client.start(seen.append)
        os.kill(pid_of(client), signal.SIGKILL)
        await wait_for_state(client, EngineState.RESTARTING)
        await tokens(client, request_of("a"))
        await client.close()
        assert seen == [StartProgress("weights", 0.5), StartProgress("warm-up", 0.5)]

    run(scenario())


def test_a_broken_progress_bar_does_not_stop_the_start() -> None:
    def broken(_: StartProgress) -> None:
        raise OSError("no terminal")

    async def scenario() -> None:
        client = client_of(FakeOptions(phases=("weights",)))
        await client.start(broken)
        assert client.healthy
        await client.close()

    run(scenario())


def test_closing_ends_requests_in_flight_and_the_process() -> None:
    async def scenario() -> None:
        async with running() as client:
            user = asyncio.create_task(tokens(client, request_of("a", fake_core.ENDLESS)))

            async def in_flight() -> bool:
                return (await client.stats()).num_running == 1

            await until(in_flight)
            pid = pid_of(client)
            await client.close()
            with pytest.raises(errors.EngineClosedError, match="server is shutting down"):
                await user
            with pytest.raises(errors.EngineClosedError, match="server is shutting down"):
                await tokens(client, request_of("b"))
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
            assert client.status.state is EngineState.CLOSED

    run(scenario())


def test_a_hung_engine_is_killed_when_closed() -> None:
    async def scenario() -> None:
        async with running(stop_grace_s=0.1, stats_timeout_s=0.1) as client:
            user = asyncio.create_task(tokens(client, request_of("a", fake_core.HANG)))
            await asyncio.sleep(0)
            assert (await client.stats()).num_kv_blocks in (0, 77)  # the last ones known; does not hang
            pid = pid_of(client)
            await client.close()
            await asyncio.wait([user])
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(scenario())


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_start_can_be_given_up(how: str) -> None:
    async def scenario() -> None:
        client = client_of(FakeOptions(start_fault="hang", phases=("begun",)))
        begun = asyncio.Event()
        start = asyncio.create_task(client.start(lambda _: begun.set()))
        await begun.wait()
        if how == "close":
            await client.close()
            with pytest.raises(errors.EngineDeadError):
                await start
        else:
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start
        await client.close()

    run(scenario())


def test_closing_during_a_restart_ends_it() -> None:
    async def scenario() -> None:
        slow = RestartPolicy(first_delay_s=3600.0, max_delay_s=3600.0)
        async with running(restart=slow) as client:
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.RESTARTING)
            waiting = asyncio.create_task(tokens(client, request_of("a")))
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(errors.EngineClosedError, match="server is shutting down"):
                await waiting

    run(scenario())


def test_the_sockets_are_private_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(base: Path) -> None:
        client = client_of(FakeOptions(phases=("begun",)))
        leftovers: list[list[Path]] = []
        start = asyncio.create_task(client.start(lambda _: leftovers.append(list(base.iterdir()))))
        await asyncio.sleep(0)
        assert [path.stat().st_mode & 0o777 for path in base.iterdir()] == [0o700]
        await start
        assert leftovers == [[]]  # gone before the load begins, so a kill -9 leaves nothing either
        assert await tokens(client, request_of("a"))
        await client.close()
        assert list(base.iterdir()) == []

    with tempfile.TemporaryDirectory(prefix="lp-") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        run(scenario(Path(base)))


def test_the_log_names_the_process_that_died_and_serves_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loraplex")

    async def scenario() -> None:
        options = ClientOptions(restart=QUICK, env=CHILD_ENV)
        client = EngineClient(FakeOptions(), factory=FACTORY, options=options, name="the engine of replica 7")
        await client.start()
        try:
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.RESTARTING)
            assert "the engine of replica 7 died" in client.status.message
            await wait_for_state(client, EngineState.READY)
        finally:
            await client.close()

    run(scenario())
    assert "the engine of replica 7 died (killed by SIGKILL" in caplog.text
    assert "the engine of replica 7 serves again, " in caplog.text


def test_a_client_that_was_not_started_says_so() -> None:
    async def scenario() -> None:
        client = client_of()
        with pytest.raises(errors.EngineDeadError, match="not started"):
            await tokens(client, request_of("a"))
        await client.close()

    run(scenario())
