"""Streams that stall on a server which reports to be healthy are continued elsewhere, if any replica can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_fleets import costs
from replicas import BASE, TINY, answer, request_for, run, spec_in, until
from vllm_dialect import Behaviour, VllmDialect, tokens_of

from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineDeadError, RequestMovedError
from loraplex.core.stats import EngineStats
from loraplex.fleet.policy import Policy
from loraplex.server.continuing import Continued
from loraplex.server.fleet.backend_http import BackendAddress
from loraplex.server.fleet.completion_calls import _Call
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.http_replica import HttpReplica
from loraplex.server.fleet.routing_events import Limits
from loraplex.server.fleet.stalled_streams import StalledStreams, StreamWait

LONG_S = 62.0  # longer than a short prompt may take
SLOW_S = 602.0  # longer than a preempted request may wait


@pytest.mark.parametrize(
    ("wait", "after_s", "is_stalled"),
    [
        (StreamWait(100, has_tokens=True, waits_since_s=0.0), 60.5, False),
        (StreamWait(100, has_tokens=True, waits_since_s=0.0), 61.5, True),
        (StreamWait(100, has_tokens=True, waits_since_s=20.0), 61.5, False),
        (StreamWait(100, has_tokens=True, waits_since_s=None), 1e6, False),
        (StreamWait(100, has_tokens=False, waits_since_s=0.0), 61.5, True),
        (StreamWait(60_000, has_tokens=False, waits_since_s=0.0), 600.0, False),
        (StreamWait(60_000, has_tokens=False, waits_since_s=0.0), 661.0, True),
    ],
)
def test_a_stream_stalls_when_it_is_silent_for_longer_than_a_prompt_takes(
    wait: StreamWait, after_s: float, is_stalled: bool
) -> None:
    clock = ManualClock()
    stalls = StalledStreams(clock, 60.0)
    clock.advance(after_s)
    assert stalls.among({"r": wait}) == (["r"] if is_stalled else [])


@pytest.mark.parametrize("by_metrics", [False, True])
def test_a_server_that_computes_anything_may_let_others_wait(by_metrics: bool) -> None:
    """This covers requests preempted for ten minutes, and requests queued for ten without any token."""
    clock = ManualClock()
    stalls = StalledStreams(clock, 60.0)
    waits = {
        "queued": StreamWait(100, waits_since_s=0.0),
        "begun": StreamWait(100, has_tokens=True, waits_since_s=0.0),
    }
    stalls.saw(EngineStats(num_kv_blocks_used=3, num_running=3), num_ours=2)

    def compute_until(now_s: float) -> None:
        while clock.now_s() < now_s:
            clock.advance(40.0)
            if by_metrics:
                stalls.saw(EngineStats(num_kv_blocks_used=int(clock.now_s()), num_running=3), num_ours=2)
            else:
                stalls.arrived()

    compute_until(600.0)
    assert (stalls.among(waits), stalls.computes(waits)) == ([], True)
    compute_until(640.0)
    stalled = ["queued", "begun"] if by_metrics else ["begun"]
    assert stalls.among(waits) == stalled
    clock.advance(60.5)
    assert (stalls.among(waits), stalls.computes(waits)) == (stalled, True)
    clock.advance(1.0)
    assert (stalls.among(waits), stalls.computes(waits)) == (["queued", "begun"], False)


def test_requests_that_wait_and_the_first_figures_do_not_show_that_a_server_computes() -> None:
    clock = ManualClock()
    stalls = StalledStreams(clock, 60.0)
    clock.advance(LONG_S)
    stalls.saw(EngineStats(num_kv_blocks_used=4), num_ours=0)
    stalls.saw(EngineStats(num_kv_blocks_used=4, num_waiting=7), num_ours=0)
    assert not stalls.computes({})


def test_metrics_that_only_our_own_requests_move_do_not_show_that_a_server_computes() -> None:
    """Our own tokens would have arrived: something delays its answers."""
    clock = ManualClock()
    stalls = StalledStreams(clock, 60.0)
    clock.advance(LONG_S)
    stalls.saw(EngineStats(num_steps=1, num_running=1, num_waiting=1), num_ours=2)
    stalls.saw(EngineStats(num_steps=2, num_running=1, num_waiting=1), num_ours=2)
    assert not stalls.computes({})
    stalls.saw(EngineStats(num_steps=3, num_running=1, num_waiting=2), num_ours=2)
    assert stalls.computes({})


@asynccontextmanager
async def fleet_of(clock: ManualClock, *servers: VllmDialect) -> AsyncIterator[FleetEngine]:
    setup = FleetSetup(
        make=lambda number: HttpReplica(BackendAddress(url=servers[number].url), TINY, clock=clock),
        limits=lambda info: Limits(max_running=8, kv_tokens=16_000),
        policy=Policy.of("round-robin"),
        costs=costs(),
        clock=clock,
    )
    fleet = FleetEngine(setup, len(servers))
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


@asynccontextmanager
async def replica_at(clock: ManualClock, server: VllmDialect) -> AsyncIterator[HttpReplica]:
    replica = HttpReplica(BackendAddress(url=server.url), TINY, clock=clock)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.close()


def streamed(server: VllmDialect) -> list[dict[str, Any]]:
    """Return the completions that came from requests, not from the watch."""
    return [body for body in server.bodies("completions") if body.get("stream")]


async def until_sent(server: VllmDialect) -> None:
    await until(lambda: bool(streamed(server)))


async def until_waiting(fleet: FleetEngine, number: int, *, num_tokens: int) -> None:
    """Wait until the only request waits for its next output after this many tokens."""
    replica = fleet._members[number]
    assert isinstance(replica, HttpReplica)

    def is_waiting() -> bool:
        calls = list(replica._calls._calls.values())
        had = list(fleet._requests.num_output().values())
        return had == [num_tokens] and any(each.reader and each.waits_since_s is not None for each in calls)

    await until(is_waiting)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_stream_that_stalls_goes_on_elsewhere(has_begun: bool) -> None:
    """`has_begun`: it stalls after some tokens, else before the headers of the answer."""

    async def scenario() -> None:
        clock, gate = ManualClock(), asyncio.Event()
        stuck = Behaviour(pause_after=3) if has_begun else Behaviour(answer_gate=gate)
        async with (
            VllmDialect(stuck) as first,
            VllmDialect() as second,
            fleet_of(clock, first, second) as fleet,
        ):
            answering = asyncio.create_task(answer(fleet, request_for([5, 6], max_tokens=8)))
            if has_begun:
                await until_waiting(fleet, 0, num_tokens=3)
            else:
                await until(lambda: len(first.bodies("completions")) == 2)
            assert not fleet._members[0].stalled
            clock.advance(LONG_S)
            assert fleet._members[0].stalled
            for _ in range(2):  # also if it has not ended there by the next check
                fleet._requests.move_stalled()
            output = await answering
            had = tokens_of(BASE, [5, 6], 3) if has_begun else []
            assert (len(output.token_ids), list(output.token_ids[: len(had)])) == (8, had)
            assert second.bodies("completions")[-1]["prompt"] == [5, 6, *had]
            assert fleet.continued == {Continued.MOVED: 1}
            await until(lambda: first.num_cancelled == 1 or not has_begun)

    run(scenario())


def test_a_stream_waits_when_nobody_else_can_go_on_with_it() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        does = Behaviour(pause_after=3)
        async with VllmDialect(does) as only, fleet_of(clock, only) as fleet:
            answering = asyncio.create_task(answer(fleet, request_for([5, 6], max_tokens=8)))
            await until_waiting(fleet, 0, num_tokens=3)
            clock.advance(LONG_S)
            assert fleet._members[0].stalled
            fleet._requests.move_stalled()
            does.resume.set()
            assert list((await answering).token_ids) == tokens_of(BASE, [5, 6], 8)
            assert fleet.continued == {}

    run(scenario())


def test_a_stream_that_stalls_everywhere_is_sent_to_each_once() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        does = [Behaviour(pause_after=0), Behaviour(pause_after=0)]
        async with (
            VllmDialect(does[0]) as first,
            VllmDialect(does[1]) as second,
            fleet_of(clock, first, second) as fleet,
        ):
            answering = asyncio.create_task(answer(fleet, request_for([5, 6], max_tokens=8)))
            for number in range(2):
                await until_waiting(fleet, number, num_tokens=0)
                clock.advance(LONG_S)
                assert fleet._members[number].stalled
                fleet._requests.move_stalled()
            does[1].resume.set()
            assert list((await answering).token_ids) == tokens_of(BASE, [5, 6], 8)
            assert fleet.continued == {Continued.MOVED: 1}

    run(scenario())


def test_a_server_on_which_streams_stall_is_sent_no_others_until_it_completes_a_prompt() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        does = Behaviour(pause_after=3)
        async with (
            VllmDialect(does) as first,
            VllmDialect() as second,
            fleet_of(clock, first, second) as fleet,
        ):
            answering = asyncio.create_task(answer(fleet, request_for([5, 6], max_tokens=8)))
            await until_waiting(fleet, 0, num_tokens=3)
            does.failure = (500, "InternalServerError", "EngineCore is stuck")
            clock.advance(LONG_S)
            fleet._requests.move_stalled()
            await answering
            assert not fleet._members[0].healthy
            clock.advance(1.0)
            await until(lambda: "EngineCore is stuck" in fleet.replicas[0].status.message)
            message = fleet.replicas[0].status.message
            assert "says that it is well, but completes no prompt" in message
            does.failure = does.pause_after = None

            def is_back() -> bool:
                clock.advance(1.0)
                return fleet._members[0].healthy

            await until(is_back)

    run(scenario())


def test_a_server_on_which_streams_stall_stays_aside_when_it_is_lost_and_found() -> None:
    """It may miss a health check at any moment, and is back when it answers the next."""

    async def scenario() -> None:
        clock, does = ManualClock(), Behaviour()
        async with VllmDialect(does) as server, replica_at(clock, server) as replica:
            clock.advance(LONG_S)
            does.failure = (500, "InternalServerError", "EngineCore is stuck")
            replica.hand_over_stalled([])
            assert not replica.healthy
            replica._watch.lose("it was stopped")
            await until(lambda: replica._watch.life.is_ready)
            assert not replica.healthy
            assert "says that it is well, but sends nothing" in replica.status.message

    run(scenario())


def test_a_version_is_staged_without_a_server_on_which_that_stalls(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock, spec = ManualClock(), spec_in(tmp_path)
        async with (
            VllmDialect(Behaviour(answer_gate=asyncio.Event())) as first,
            VllmDialect() as second,
            fleet_of(clock, first, second) as fleet,
        ):
            await fleet.add_adapter(spec)
            staging = asyncio.create_task(fleet.stage_adapter(spec.version))
            await until_sent(first)
            clock.advance(LONG_S)
            fleet._requests.move_stalled()
            await staging
            assert fleet.holders(spec.version) == [1]
            await fleet.stage_adapter(spec.version)  # at once, because it is no longer asked

    run(scenario())


def test_a_staging_that_stalls_everywhere_names_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock, spec = ManualClock(), spec_in(tmp_path)
        async with (
            VllmDialect(Behaviour(answer_gate=asyncio.Event())) as only,
            fleet_of(clock, only) as fleet,
        ):
            await fleet.add_adapter(spec)
            staging = asyncio.create_task(fleet.stage_adapter(spec.version))
            await until_sent(only)
            clock.advance(LONG_S)
            fleet._requests.move_stalled()
            with pytest.raises(EngineDeadError, match=f"{only.url} says that it is well, but sent nothing"):
                await staging

    run(scenario())


def test_a_request_whose_wait_has_just_ended_is_not_given_up_as_well() -> None:
    async def scenario() -> None:
        call = _Call(5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0) as call.opening:
                await asyncio.Event().wait()
        call.give_up(RequestMovedError("the fleet takes it away"))
        assert call.moved is None

    run(scenario())


def test_a_request_that_no_server_has_begun_to_answer_is_not_given_up_by_the_moves() -> None:
    """Two moves take longer than a request waits for a server that takes it."""

    async def scenario() -> None:
        clock = ManualClock()
        async with (
            VllmDialect(Behaviour(answer_gate=asyncio.Event())) as first,
            VllmDialect(Behaviour(answer_gate=asyncio.Event())) as second,
            VllmDialect() as third,
            fleet_of(clock, first, second, third) as fleet,
        ):
            answering = asyncio.create_task(answer(fleet, request_for([5, 6], max_tokens=8)))
            for server in (first, second):
                await until_sent(server)
                clock.advance(100.0)
                fleet._requests.move_stalled()
            assert list((await answering).token_ids) == tokens_of(BASE, [5, 6], 8)

    run(scenario())


def test_a_request_that_hangs_servers_is_not_sent_to_all_of_them() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with AsyncExitStack() as stack:
            stuck = [VllmDialect(Behaviour(pause_after=0)) for _ in range(3)]
            servers = [await stack.enter_async_context(each) for each in (*stuck, VllmDialect())]
            fleet = await stack.enter_async_context(fleet_of(clock, *servers))
            answering = asyncio.create_task(answer(fleet, request_for([5, 6], max_tokens=8)))
            for number in range(3):
                await until_waiting(fleet, number, num_tokens=0)
                clock.advance(LONG_S)
                fleet._requests.move_stalled()
            with pytest.raises(EngineDeadError, match="3 replicas died or fell silent one after the other"):
                await answering
            assert [len(streamed(server)) for server in servers] == [1, 1, 1, 0]

    run(scenario())


@pytest.mark.parametrize("computes", [False, True])
def test_a_seeded_stream_goes_on_by_new_draws_only_if_its_server_computes_nothing(computes: bool) -> None:
    async def scenario() -> None:
        clock, does = ManualClock(), Behaviour(pause_after=3)
        async with (
            VllmDialect(does) as first,
            VllmDialect() as second,
            fleet_of(clock, first, second) as fleet,
        ):
            request = request_for([5, 6], max_tokens=8, temperature=1.0, seed=7)
            answering = asyncio.create_task(answer(fleet, request))
            await until_waiting(fleet, 0, num_tokens=3)
            clock.advance(SLOW_S)
            if computes:
                replica = fleet._members[0]
                assert isinstance(replica, HttpReplica)
                replica._watch.stalls.arrived()
            assert fleet._members[0].stalled
            fleet._requests.move_stalled()
            does.resume.set()
            assert len((await answering).token_ids) == 8
            assert len(streamed(second)) == (0 if computes else 1)

    run(scenario())


def test_a_stream_that_has_the_logprobs_of_its_prompt_goes_on_elsewhere() -> None:
    async def scenario() -> None:
        clock, does = ManualClock(), Behaviour(pause_after=3)
        async with (
            VllmDialect(does) as first,
            VllmDialect() as second,
            fleet_of(clock, first, second) as fleet,
        ):
            request = request_for([5, 6], max_tokens=8, prompt_logprobs=1)
            answering = asyncio.create_task(answer(fleet, request))
            await until_waiting(fleet, 0, num_tokens=3)
            clock.advance(LONG_S)
            fleet._requests.move_stalled()
            does.resume.set()
            assert len((await answering).token_ids) == 8
            assert [body.get("echo") for body in streamed(second)] == [None]

    run(scenario())


def test_a_server_whose_tokens_come_is_not_set_aside() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with VllmDialect() as server, replica_at(clock, server) as replica:
            clock.advance(SLOW_S)
            await answer(replica, request_for([5, 6]))
            replica.hand_over_stalled([])
            assert replica.healthy

    run(scenario())


def test_a_server_that_has_too_many_requests_is_not_set_aside_for_long() -> None:
    async def scenario() -> None:
        clock, does = ManualClock(), Behaviour()
        async with VllmDialect(does) as server, replica_at(clock, server) as replica:
            replica._watch.drops.is_cut = True  # as it was when it was set aside before
            does.failure = (429, "TooManyRequests", "too many requests wait")
            clock.advance(LONG_S)
            replica.hand_over_stalled([])
            assert not replica.healthy
            assert not replica.status.is_dropping
            clock.advance(1.0)
            await until(lambda: replica.healthy)

    run(scenario())


def test_a_client_that_reads_slowly_has_not_stalled() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with (
            VllmDialect(Behaviour(pause_after=3)) as server,
            replica_at(clock, server) as replica,
            aclosing(replica.generate(request_for([5, 6], max_tokens=8))) as outputs,
        ):
            num_tokens = 0
            while num_tokens < 3:  # the first output only says that it is queued
                num_tokens += len((await anext(outputs)).token_ids)
                clock.advance(SLOW_S)
                assert replica.stalled == []
            following = asyncio.ensure_future(anext(outputs))
            (call,) = replica._calls._calls.values()
            await until(lambda: call.waits_since_s is not None)
            clock.advance(LONG_S)
            assert len(replica.stalled) == 1  # now the client waits for the server
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    run(scenario())


def test_a_request_whose_adapter_is_loaded_once_more_has_not_stalled(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock, does, spec = ManualClock(), Behaviour(), spec_in(tmp_path / "a")
        async with VllmDialect(does) as server, replica_at(clock, server) as replica:
            await replica.add_adapter(spec)
            does.num_forgotten, does.load_gate = 1, asyncio.Event()
            num_loads = len(server.bodies("load_lora_adapter"))
            request = request_for([5, 6], adapter=spec.version)
            answering = asyncio.create_task(answer(replica, request))
            await until(lambda: len(server.bodies("load_lora_adapter")) > num_loads)
            clock.advance(LONG_S)
            assert replica.stalled == []
            does.load_gate.set()
            assert len((await answering).token_ids) == 8

    run(scenario())
