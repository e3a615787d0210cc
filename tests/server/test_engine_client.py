from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fake_core
import pytest
import uvloop
from fake_core import CHILD_ENV, FACTORY, FakeOptions, request_of, spec_of, tokens_of

from loraplex.core import errors
from loraplex.core.clock import ManualClock
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.stats import EngineStats
from loraplex.server.engine_client import ClientOptions, EngineClient, EngineState
from loraplex.server.protocol_ipc import StartProgress
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
    """Poll for what another process does and nobody announces; `run` bounds it."""
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


def test_a_request_gets_its_tokens_and_its_reason() -> None:
    async def scenario() -> None:
        async with running() as client:
            assert client.healthy
            assert client.info is not None
            assert (client.info.num_kv_blocks, client.info.max_model_len) == (77, 512)
            request = request_of("a", max_tokens=5)
            outputs = [output async for output in client.generate(request)]
            assert tuple(token for output in outputs for token in output.token_ids) == tokens_of(request)
            assert [output.finish_reason for output in outputs][-1] is FinishReason.LENGTH

    run(scenario())


@both_loops
def test_two_thousand_requests_at_once_keep_their_order(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def scenario() -> None:
        async with running() as client:
            requests = [request_of(f"r{i}", prompt=i, max_tokens=8) for i in range(2000)]
            answers = await asyncio.gather(*(tokens(client, request) for request in requests))
            assert answers == [tokens_of(request) for request in requests]
            assert (await client.stats()).num_running == 0

    run(scenario(), loop_factory)


def test_a_slow_consumer_gets_what_it_missed_in_one_piece() -> None:
    async def scenario() -> None:
        async with running() as client:
            request = request_of("slow", max_tokens=500)
            stream = client.generate(request)
            outputs = [await anext(stream)]

            async def finished() -> bool:
                return (await client.stats()).num_running == 0

            await until(finished)  # stats come behind the outputs on the same socket
            outputs += [output async for output in stream]
            assert len(outputs) == 2
            assert outputs[0].token_ids + outputs[1].token_ids == tokens_of(request)

    run(scenario())


def test_closing_a_stream_cancels_the_request() -> None:
    async def scenario() -> None:
        async with running() as client:
            stream = client.generate(request_of("a", fake_core.ENDLESS))
            await anext(stream)
            assert (await client.stats()).num_running == 1
            await stream.aclose()
            assert (await client.stats()).num_running == 0

    run(scenario())


def test_cancelling_the_consumer_cancels_the_request() -> None:
    async def scenario() -> None:
        async with running() as client:
            consumer = asyncio.create_task(tokens(client, request_of("a", fake_core.SILENT)))

            async def in_flight() -> bool:
                return (await client.stats()).num_running == 1

            await until(in_flight)
            consumer.cancel()
            await asyncio.wait([consumer])
            assert (await client.stats()).num_running == 0

    run(scenario())


def test_refusals_arrive_as_what_they_are_and_hurt_nobody() -> None:
    async def scenario() -> None:
        async with running() as client:
            with pytest.raises(errors.InvalidRequestError, match="not liked") as caught:
                await tokens(client, request_of("a", fake_core.REJECT))
            assert caught.value.param == "prompt"
            with pytest.raises(errors.CapacityError):
                await tokens(client, request_of("b", fake_core.TOO_LARGE))
            with pytest.raises(errors.UnknownModelError):
                await tokens(client, request_of("c", adapter="v1"))
            failed = [output async for output in client.generate(request_of("d", fake_core.FAIL))]
            assert failed == [
                EngineOutput(request_id="d", finish_reason=FinishReason.ERROR, error="lost its adapter")
            ]
            assert await tokens(client, request_of("e")) == tokens_of(request_of("e"))
            assert client.status.num_restarts == 0

    run(scenario())


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


@pytest.mark.parametrize("how", ["drained", "overtaken"])
def test_removing_an_adapter_waits_for_its_requests_unless_it_is_added_again(how: str) -> None:
    async def scenario() -> None:
        async with running() as client:
            await client.add_adapter(spec_of("v1"))
            user = asyncio.create_task(tokens(client, request_of("a", fake_core.SILENT, adapter="v1")))

            async def in_use() -> bool:
                return any(adapter.in_flight for adapter in (await client.stats()).adapters)

            await until(in_use)
            removals = [asyncio.create_task(client.remove_adapter("v1")) for _ in range(2)]
            await asyncio.sleep(0)
            assert (await client.stats()).num_running == 1
            assert not any(task.done() for task in removals)
            if how == "drained":
                user.cancel()
                await asyncio.gather(*removals)
                assert (await client.stats()).adapters == ()
            else:
                await client.add_adapter(spec_of("v1"))
                await asyncio.gather(*removals)
                assert await tokens(client, request_of("b", adapter="v1"))
                user.cancel()
            await asyncio.wait([user])

    run(scenario())


def test_a_removal_under_way_ends_with_the_engine() -> None:
    async def scenario() -> None:
        async with running() as client:
            await client.add_adapter(spec_of("v1"))
            user = asyncio.create_task(tokens(client, request_of("a", fake_core.SILENT, adapter="v1")))

            async def in_use() -> bool:
                return any(adapter.in_flight for adapter in (await client.stats()).adapters)

            await until(in_use)
            removal = asyncio.create_task(client.remove_adapter("v1"))
            await asyncio.sleep(0)
            os.kill(pid_of(client), signal.SIGKILL)
            await removal
            await asyncio.wait([user])
            with pytest.raises(errors.UnknownModelError):
                await tokens(client, request_of("b", adapter="v1"))

    run(scenario())


def test_adapters_may_change_while_the_engine_restarts() -> None:
    async def scenario() -> None:
        async with running() as client:
            await client.add_adapter(spec_of("old"))
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.RESTARTING)
            await client.add_adapter(spec_of("new"))
            await client.remove_adapter("old")
            assert await tokens(client, request_of("a", adapter="new"))
            assert [adapter.version for adapter in (await client.stats()).adapters] == ["new"]

    run(scenario())


def test_a_refused_adapter_is_not_kept() -> None:
    async def scenario() -> None:
        async with running() as client:
            with pytest.raises(errors.AdapterFormatError, match="rank") as caught:
                await client.add_adapter(spec_of(fake_core.UNWANTED_VERSION))
            assert caught.value.field == "r"
            with pytest.raises(errors.UnknownModelError):
                await client.remove_adapter(fake_core.UNWANTED_VERSION)
            assert client.healthy

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
        ("exit", errors.EngineDeadError, "while starting: exit code 7"),
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
            with pytest.raises(errors.EngineDeadError, match="shut down"):
                await user
            with pytest.raises(errors.EngineDeadError, match="shut down"):
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
            with pytest.raises(errors.EngineDeadError, match="shut down"):
                await waiting

    run(scenario())


def test_stats_are_fetched_again_only_when_stale() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with running(clock=clock, stats_max_age_s=0.5) as client:
            clock.advance(1.0)
            assert (await client.stats()).num_steps == 0
            await tokens(client, request_of("a", max_tokens=4))
            assert (await client.stats()).num_steps == 0
            clock.advance(1.0)
            assert (await client.stats()).num_steps == 4

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


def test_a_client_that_was_not_started_says_so() -> None:
    async def scenario() -> None:
        client = client_of()
        with pytest.raises(errors.EngineDeadError, match="not started"):
            await tokens(client, request_of("a"))
        await client.close()

    run(scenario())
