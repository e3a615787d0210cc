"""The engine client without failures: requests, adapters and counters."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import fake_core
import pytest
from engine_client_harness import both_loops, pid_of, run, running, tokens, until, wait_for_state
from fake_core import request_of, spec_of, tokens_of

from loraplex.core import errors
from loraplex.core.clock import ManualClock
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.tenants import TenantPolicy
from loraplex.server.engine_status import EngineState
from loraplex.server.protocol_ipc import Outputs


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

            await until(finished)  # stats come after the outputs on the same socket
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
            *_, failed = [output async for output in client.generate(request_of("d", fake_core.FAIL))]
            assert failed == EngineOutput(
                request_id="d", finish_reason=FinishReason.ERROR, error="lost its adapter"
            )
            assert await tokens(client, request_of("e")) == tokens_of(request_of("e"))
            assert client.status.num_restarts == 0

    run(scenario())


def test_outputs_on_their_way_when_the_engine_dies_are_delivered_once_and_then_the_error() -> None:
    async def scenario() -> None:
        async with running() as client:
            requests = [request_of(f"r{i}", fake_core.SILENT) for i in range(100)]
            queued = asyncio.Semaphore(0)

            async def consume(request: EngineRequest) -> tuple[list[int], str]:
                found: list[int] = []
                try:
                    async for output in client.generate(request):
                        if not output.token_ids:
                            queued.release()
                        found += output.token_ids
                except errors.EngineDeadError as error:
                    return found, str(error)
                return found, "finished"

            consumers = [asyncio.create_task(consume(request)) for request in requests]
            for _ in requests:
                await queued.acquire()
            # More than are delivered in one iteration of the loop: every second answer is complete with it.
            reasons = [FinishReason.LENGTH if i % 2 else None for i in range(len(requests))]
            client._on_event(
                Outputs(
                    [
                        EngineOutput(request_id=request.request_id, token_ids=(i,), finish_reason=reason)
                        for i, (request, reason) in enumerate(zip(requests, reasons, strict=True))
                    ]
                )
            )
            assert client._streams._undelivered
            client._drop_in_flight("the engine died")
            assert await asyncio.gather(*consumers) == [
                ([i], "finished" if reason else "the engine died") for i, reason in enumerate(reasons)
            ]
            assert not client._streams._undelivered
            assert not list(client._streams)
            assert await tokens(client, request_of("next")) == tokens_of(request_of("next"))

    run(scenario())


@both_loops
def test_every_request_of_an_engine_that_dies_ends_with_its_tokens_or_an_error(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def scenario() -> None:
        async with running() as client:
            requests = [request_of(f"r{i}", prompt=i, max_tokens=1 + 20 * (i % 2)) for i in range(300)]

            async def consume(request: EngineRequest) -> bool:
                """Return whether the answer was complete."""
                found: tuple[int, ...] = ()
                try:
                    async for output in client.generate(request):
                        found += output.token_ids
                except errors.EngineDeadError:
                    assert found == tokens_of(request)[: len(found)]
                    return False
                assert found == tokens_of(request)
                return True

            killer = request_of("killer", fake_core.KILL)
            complete = await asyncio.gather(*map(consume, requests), consume(killer))
            assert not complete[-1]
            assert await tokens(client, request_of("next")) == tokens_of(request_of("next"))

    run(scenario(), loop_factory)


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


def test_the_rights_of_tenants_outlive_the_engine_process() -> None:
    async def scenario() -> None:
        async with running() as client:
            client.set_tenants([TenantPolicy(name="a", share=3.0), TenantPolicy(name="b", share=4.0)])
            assert (await client.stats()).num_waiting == 7
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.RESTARTING)
            await tokens(client, request_of("r"))
            assert (await client.stats()).num_waiting == 7
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.RESTARTING)
            client.set_tenants([TenantPolicy(name="a", share=2.0)])
            await tokens(client, request_of("s"))
            assert (await client.stats()).num_waiting == 2

    run(scenario())


def test_a_refused_adapter_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running() as client:
            with pytest.raises(errors.AdapterFormatError, match="rank") as caught:
                await client.add_adapter(spec_of(fake_core.UNWANTED_VERSION))
            assert caught.value.field == "r"
            with pytest.raises(errors.UnknownModelError):
                await client.remove_adapter(fake_core.UNWANTED_VERSION)
            assert client.healthy

    run(scenario())
    assert "refused" not in caplog.text, "whoever added it was told"


def test_an_adapter_refused_after_a_restart_is_told_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running() as client:
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.RESTARTING)
            await client.add_adapter(spec_of(fake_core.UNWANTED_VERSION))
            assert await tokens(client, request_of("a"))

    run(scenario())
    assert f"adapter {fake_core.UNWANTED_VERSION[:12]} was refused by the engine" in caplog.text


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
