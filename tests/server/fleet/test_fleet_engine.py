"""A fleet of real engine processes around the fake core: which replica serves, what dies, and what is
shown."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator

import fake_core
import pytest
from engine_client_harness import pid_of, run, until, wait_for_state
from engine_fleets import Replicas, costs, fleet_of, tokens
from fake_core import FakeOptions, request_of, spec_of, tokens_of

from loraplex.core import errors
from loraplex.core.request import EngineOutput
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.perf.profile_json import profile_to_json
from loraplex.server.continuing import Continued
from loraplex.server.engine_client import EngineClient
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.routing_events import Began, Limits
from loraplex.server.restart_policy import RestartPolicy

NEVER = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, max_crashes=0)


def kill(client: EngineClient) -> None:
    os.kill(pid_of(client), signal.SIGKILL)


def test_requests_are_shared_among_replicas() -> None:
    async def scenario() -> None:
        async with fleet_of(3) as (fleet, _):
            requests = [request_of(f"r{i}", prompt=i, max_tokens=4) for i in range(30)]
            answers = await asyncio.gather(*(tokens(fleet, request) for request in requests))
            assert answers == [tokens_of(request) for request in requests]
            assert [replica.num_sent for replica in fleet.replicas] == [10, 10, 10]
            assert [replica.num_in_flight for replica in fleet.replicas] == [0, 0, 0]
            assert fleet.info is not None
            assert (fleet.info.num_kv_blocks, fleet.info.max_model_len) == (3 * 77, 512)

    run(scenario())


def test_a_request_whose_replica_dies_before_its_first_token_is_served_elsewhere() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, clients):
            silent = [
                asyncio.create_task(tokens(fleet, request_of(f"s{i}", fake_core.SILENT))) for i in (0, 1)
            ]

            async def both_queued() -> bool:
                return all([(await client.stats()).num_running == 1 for client in clients.values()])

            await until(both_queued)
            kill(clients[0])

            async def moved() -> bool:
                return (await clients[1].stats()).num_running == 2

            await until(moved)
            assert [replica.num_in_flight for replica in fleet.replicas] == [0, 2]
            assert [replica.num_replayed for replica in fleet.replicas] == [0, 1]
            assert fleet.continued == {Continued.DIED: 1}
            for task in silent:
                task.cancel()
            await asyncio.gather(*silent, return_exceptions=True)
            assert [replica.num_in_flight for replica in fleet.replicas] == [0, 0]

    run(scenario())


def test_a_request_that_kills_its_replicas_does_not_kill_the_fleet() -> None:
    async def scenario() -> None:
        async with fleet_of(5) as (fleet, clients):
            with pytest.raises(
                errors.EngineDeadError, match="3 replicas died or fell silent one after the other"
            ):
                await tokens(fleet, request_of("poison", fake_core.KILL))
            assert sum(client.status.num_restarts == 0 and client.healthy for client in clients.values()) >= 2
            request = request_of("after", max_tokens=4)
            assert await tokens(fleet, request) == tokens_of(request)

    run(scenario())


async def replica_of_stream(fleet: FleetEngine) -> int:
    """Return the number of the replica that has the only stream."""
    (number,) = [replica.number for replica in fleet.replicas if replica.num_in_flight]
    return number


@pytest.mark.parametrize("how", ["kill", "drain", "restart"])
def test_an_answer_goes_on_where_it_was_when_its_replica_is_gone(how: str) -> None:
    async def scenario() -> None:
        async with fleet_of(3) as (fleet, clients):
            request = request_of("long", max_tokens=20_000)
            found: list[int] = []
            lost: list[int] = []
            changes: list[asyncio.Task[None]] = []

            async def lose(number: int) -> None:
                lost.append(number)
                if how == "kill":
                    kill(clients[number])
                elif how == "drain":
                    fleet.drain(number, move=True)
                else:
                    changes.append(asyncio.create_task(fleet.restart(number, move=True)))

            async for output in fleet.generate(request):
                found += output.token_ids
                num_sent = sum(replica.num_sent for replica in fleet.replicas)
                if output.token_ids and output.finish_reason is None and num_sent == len(lost) + 1 < 3:
                    await lose(await replica_of_stream(fleet))
            assert tuple(found) == tokens_of(request)
            assert len(set(lost)) == 2
            await asyncio.gather(*changes)
            assert [replica.num_in_flight for replica in fleet.replicas] == [0, 0, 0]

    run(scenario())


def test_replicas_that_leave_at_once_leave_their_requests_to_the_others() -> None:
    async def scenario() -> None:
        async with fleet_of(3) as (fleet, _):
            requests = [request_of(f"r{number}", prompt=number, max_tokens=20_000) for number in range(6)]
            answers = [asyncio.create_task(tokens(fleet, request)) for request in requests]
            while sum(replica.num_in_flight for replica in fleet.replicas) < 6:
                await asyncio.sleep(0)
            await fleet.scale(1, move=True)
            assert [replica.number for replica in fleet.replicas] == [0]
            assert fleet.replicas[0].num_sent == 6
            assert await asyncio.gather(*answers) == [tokens_of(request) for request in requests]

    run(scenario())


def test_a_stream_that_goes_on_is_seen_to_by_those_who_are_left() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, clients):
            stream = fleet.generate(request_of("long", fake_core.ENDLESS, max_tokens=1 << 30))
            while not (await anext(stream)).token_ids:
                pass
            kill(clients[await replica_of_stream(fleet)])
            await until_moved(fleet, stream, 2)
            assert fleet.healthy
            for number in range(4):
                request = request_of(f"r{number}", max_tokens=3)
                assert await tokens(fleet, request) == tokens_of(request)
            await stream.aclose()
            assert [replica.num_in_flight for replica in fleet.replicas] == [0, 0]

    run(scenario())


async def until_moved(fleet: FleetEngine, stream: AsyncGenerator[EngineOutput, None], num_sent: int) -> None:
    """Read a stream until this many requests were sent to replicas."""
    while sum(replica.num_sent for replica in fleet.replicas) < num_sent:
        await anext(stream)


def test_moves_are_no_deaths() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, _):
            stream = fleet.generate(request_of("long", fake_core.ENDLESS, max_tokens=1 << 30))
            await anext(stream)
            for moves in range(1, 7):
                number = await replica_of_stream(fleet)
                fleet.drain(number, move=True)
                await until_moved(fleet, stream, 1 + moves)
                fleet.undrain(number)
            await stream.aclose()
            assert fleet.continued == {Continued.MOVED: 6}

    run(scenario())


def test_a_replica_that_hangs_is_left_by_force() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, clients):
            request = request_of("long", max_tokens=50_000)
            stream = fleet.generate(request)
            found: list[int] = []
            while not found:
                found += (await anext(stream)).token_ids
            number = await replica_of_stream(fleet)
            stopped = pid_of(clients[number])
            os.kill(stopped, signal.SIGSTOP)
            try:
                fleet.drain(number, move=True)
                async for output in stream:
                    found += output.token_ids
                assert tuple(found) == tokens_of(request)
            finally:
                os.kill(stopped, signal.SIGCONT)

    run(scenario())


def test_a_stream_ends_with_the_fleet_that_is_closed() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, _):
            stream = fleet.generate(request_of("long", fake_core.ENDLESS, max_tokens=1 << 30))
            await anext(stream)
            await fleet.close()
            with pytest.raises(errors.EngineClosedError):
                async for _ in stream:
                    pass

    run(scenario())


def test_requests_wait_for_the_first_replica_that_comes_back() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, clients):
            for client in clients.values():
                kill(client)
                await wait_for_state(client, EngineState.RESTARTING)
            request = request_of("patient", max_tokens=3)
            assert await tokens(fleet, request) == tokens_of(request)
            assert fleet.status.num_restarts >= 1

    run(scenario())


def test_a_fleet_has_failed_when_all_its_replicas_have() -> None:
    async def scenario() -> None:
        async with fleet_of(2, restart=NEVER) as (fleet, clients):
            kill(clients[0])
            await clients[0].failed.wait()
            assert not fleet.failed.is_set()
            request = request_of("served", max_tokens=3)
            assert await tokens(fleet, request) == tokens_of(request)
            kill(clients[1])
            await fleet.failed.wait()
            assert fleet.status.state is EngineState.FAILED
            with pytest.raises(errors.EngineDeadError, match="died too often"):
                await tokens(fleet, request_of("late"))

    run(scenario())


def test_a_fleet_starts_only_with_all_its_replicas() -> None:
    async def scenario() -> None:
        replicas = Replicas(None, FakeOptions(start_fault="model"))
        with pytest.raises(errors.ModelError, match="no layers"):
            await replicas.fleet(2).start()
        assert {client.status.state for client in replicas.clients.values()} <= {
            EngineState.CLOSED,
            EngineState.FAILED,
        }

    run(scenario())


def test_an_adapter_is_known_to_all_replicas_or_to_none() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, clients):
            await fleet.add_adapter(spec_of("v1"))
            for number in range(4):
                request = request_of(f"r{number}", max_tokens=2, adapter="v1")
                assert await tokens(fleet, request) == tokens_of(request)
            with pytest.raises(errors.AdapterFormatError):
                await fleet.add_adapter(spec_of(fake_core.UNWANTED_VERSION))
            with pytest.raises(errors.UnknownModelError):
                await tokens(fleet, request_of("none", adapter="v9"))
            kill(clients[0])
            await wait_for_state(clients[0], EngineState.RESTARTING)
            await wait_for_state(clients[0], EngineState.READY)
            assert [row.version for row in (await clients[0].stats()).adapters] == ["v1"]
            await fleet.remove_adapter("v1")
            assert (await fleet.stats()).adapters == ()

    run(scenario())


def test_figures_of_replicas_add_up() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, _):
            await fleet.add_adapter(spec_of("v1"))
            streams = [fleet.generate(request_of(f"r{i}", fake_core.ENDLESS, adapter="v1")) for i in range(4)]
            for stream in streams:
                await anext(stream)
            async with asyncio.timeout(30):  # replicas answer with what they said last if they are slow
                while (stats := await fleet.stats()).num_running < 4:
                    pass
            assert (stats.num_running, stats.num_kv_blocks) == (4, 2 * 77)
            assert [(row.version, row.in_flight) for row in stats.adapters] == [("v1", 4)]
            for stream in streams:
                await stream.aclose()

    run(scenario())


def test_a_router_goes_by_what_replicas_say_to_hold() -> None:
    limits = [Limits(max_running=8, kv_tokens=1024)] * 3
    began = Began(policy="auto", limits=limits, costs=profile_to_json(costs()), mean_tokens=100.0)
    routing = LiveRouting([began])
    routing.add(spec_of("v1"))
    held = AdapterStats(version="v1", tier="host", num_bytes=64, in_flight=0, loads=1)
    unknown = AdapterStats(version="v9", tier="host", num_bytes=64, in_flight=0, loads=1)
    routing.saw(2, EngineStats(adapters=(held, unknown)))
    assert routing.route("a", "v1", 8) == 2
    routing.ended("a", 3)
    routing.saw(2, EngineStats(adapters=()))
    routing.add(spec_of("v2"))
    assert routing.route("b", "v1", 8) == 2, "adapters that are added leave the others where they are"
