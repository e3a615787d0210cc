"""Streams that stall on a server which says that it is well go on elsewhere, if anybody can go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from engine_fleets import costs
from replicas import BASE, TINY, answer, request_for, run, until
from vllm_dialect import Behaviour, VllmDialect, tokens_of

from loraplex.core.clock import ManualClock
from loraplex.core.errors import RequestMovedError
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
def test_a_server_that_computes_anything_may_let_a_first_token_wait_but_no_other(by_metrics: bool) -> None:
    clock = ManualClock()
    stalls = StalledStreams(clock, 60.0)
    waits = {
        "queued": StreamWait(100, waits_since_s=0.0),
        "begun": StreamWait(100, has_tokens=True, waits_since_s=0.0),
    }
    stalls.saw(EngineStats(num_kv_blocks_used=3))
    clock.advance(40.0)
    if by_metrics:
        stalls.saw(EngineStats(num_kv_blocks_used=4))
    else:
        stalls.progressed()
    clock.advance(40.0)
    stalls.saw(EngineStats(num_kv_blocks_used=4, num_waiting=7))
    if not by_metrics:
        stalls.progressed()
    assert stalls.among(waits) == ["begun"]
    clock.advance(62.0)
    assert stalls.among(waits) == ["queued", "begun"]


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


async def until_waiting(fleet: FleetEngine, number: int, *, num_tokens: int) -> None:
    """Wait until the only request waits for what comes after so many tokens."""
    replica = fleet._members[number]
    assert isinstance(replica, HttpReplica)

    def is_waiting() -> bool:
        calls = list(replica._calls._calls.values())
        had = list(fleet._requests.num_output().values())
        return had == [num_tokens] and any(each.reader and each.waits_since_s is not None for each in calls)

    await until(is_waiting)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_stream_that_stalls_goes_on_elsewhere(has_begun: bool) -> None:
    """`has_begun`: after some tokens, else before the headers of the answer."""

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
            fleet._requests.move_stalled()
            assert fleet.continued[Continued.MOVED] == 0
            clock.advance(LONG_S)
            assert fleet._members[0].stalled
            for _ in range(2):  # also if it has not ended there when it is looked at again
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
            await until(lambda: not fleet._members[0].healthy)
            assert "EngineCore is stuck" in fleet.replicas[0].status.message
            does.failure = does.pause_after = None

            def is_back() -> bool:
                clock.advance(1.0)
                return fleet._members[0].healthy

            await until(is_back)

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
