"""Replicas that go away before they begin to answer a request: it waits, and is not given up because of
them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from engine_fleets import costs
from fake_core import request_of
from fake_core import tokens_of as fake_tokens_of
from fake_replicas import FakeReplica
from replicas import BASE, answer, request_for, run, until
from server_fixtures import SHAPE
from vllm_dialect import VllmDialect, tokens_of

from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineDeadError
from loraplex.fleet.policy import Policy
from loraplex.perf.profile_json import profile_to_json
from loraplex.server.continuing import Continued
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.backend_replicas import Backends, backend_fleet
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_requests import FleetRequests
from loraplex.server.fleet.http_replica import HttpReplica
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members
from loraplex.server.fleet.routing_events import Began, Limits


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.fleet.fleet_requests._BUSY_S", 0.001)
    monkeypatch.setattr("loraplex.server.fleet.fleet_requests._LOOK_S", 0.001)


async def three_servers(stack: AsyncExitStack) -> tuple[list[VllmDialect], FleetEngine]:
    servers = [await stack.enter_async_context(VllmDialect()) for _ in range(3)]
    backends = Backends(urls=tuple(server.url for server in servers))
    fleet = backend_fleet(backends, base_names=[BASE], shape=SHAPE, policy=Policy.of("round-robin"))
    await fleet.start()
    stack.push_async_callback(fleet.close)
    return servers, fleet


def num_asked(servers: list[VllmDialect]) -> int:
    return sum(len(server.bodies("/completions")) for server in servers)


def test_servers_that_are_all_silent_again_and_again_are_not_deaths_of_a_request_that_opens() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            servers, fleet = await three_servers(stack)
            gate = asyncio.Event()
            for server in servers:
                server.does.answer_gate = gate
            before = num_asked(servers)
            asking = asyncio.create_task(answer(fleet, request_for([5])))
            for _ in range(4):
                await until(lambda known=before: num_asked(servers) > known or asking.done())
                before = num_asked(servers)
                for replica in fleet._members:
                    assert isinstance(replica, HttpReplica)
                    replica._watch.lose("it is silent")
            gate.set()
            assert list((await asking).token_ids) == tokens_of(BASE, [5], 8)
            assert fleet.continued == {Continued.MOVED: 4}

    run(scenario())


@pytest.mark.parametrize("how", ["cut", "unavailable"])
def test_connections_that_break_before_an_answer_are_no_deaths(how: str) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            servers, fleet = await three_servers(stack)
            before = num_asked(servers)
            for server in servers:
                server.does.hang_ups = 4 if how == "cut" else 0
                server.does.failure = None if how == "cut" else (503, "ServiceUnavailable", "starting")
            asking = asyncio.create_task(answer(fleet, request_for([5])))
            await until(lambda: num_asked(servers) >= before + 10 or asking.done())
            for server in servers:
                server.does.failure = None
            assert list((await asking).token_ids) == tokens_of(BASE, [5], 8)

    run(scenario())


def requests_of(clock: ManualClock, *replicas: FakeReplica) -> FleetRequests:
    for replica in replicas:
        replica.state = EngineState.RESTARTING
    requests = FleetRequests(Members(list(replicas)), clock)
    limits = [Limits(max_running=4, kv_tokens=4096)] * len(replicas)
    began = Began(policy="round-robin", limits=limits, costs=profile_to_json(costs()), mean_tokens=64.0)
    requests.routing = LiveRouting([began])
    return requests


async def tokens(requests: FleetRequests) -> tuple[int, ...]:
    outputs = requests.generate(request_of("r1"))
    return tuple([token async for output in outputs for token in output.token_ids])


@pytest.mark.parametrize("first", [0, 1])
def test_who_comes_back_first_serves_what_waits(first: int) -> None:
    async def scenario() -> None:
        replicas = [FakeReplica(), FakeReplica()]
        asking = asyncio.create_task(tokens(requests_of(ManualClock(), *replicas)))
        await asyncio.sleep(0)
        replicas[first].come_back()
        assert await asking == fake_tokens_of(request_of("r1"))

    run(scenario())


def test_a_request_that_nobody_takes_is_given_up_in_the_end() -> None:
    async def scenario() -> None:
        clock, replica = ManualClock(), FakeReplica()
        asking = asyncio.create_task(tokens(requests_of(clock, replica)))
        await asyncio.sleep(0)
        clock.advance(179.0)
        await asyncio.sleep(0.01)
        assert not asking.done()
        clock.advance(2.0)
        with pytest.raises(EngineDeadError, match="no replica took the request within 180 s"):
            await asking

    run(scenario())
