"""A fleet of real engine processes around the fake core: who serves, what dies, and what is seen of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fake_core
import pytest
from engine_client_harness import client_of, pid_of, run, until, wait_for_state
from fake_core import FakeOptions, request_of, spec_of, tokens_of

from loraplex.adapters.spec import AdapterSpec
from loraplex.core import errors
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.fleet.policy import Policy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.perf.profile_json import profile_to_json
from loraplex.server.continuing import Continued
from loraplex.server.engine_client import EngineClient
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.fleet_engine import FleetEngine, FleetSetup
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.routing_events import Began, Limits
from loraplex.server.restart_policy import RestartPolicy

NEVER = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, max_crashes=0)


def costs() -> CostModel:
    found = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(found, CostModel)
    return found


class Replicas:
    """Makes the replicas of a fleet, and remembers the latest of each number."""

    def __init__(self, *configs: FakeOptions | None, restart: RestartPolicy | None = None) -> None:
        self._configs = configs
        self._options = {} if restart is None else {"restart": restart}
        self.clients: dict[int, EngineClient] = {}

    def make(self, number: int) -> EngineClient:
        config = self._configs[number] if number < len(self._configs) else None
        self.clients[number] = client_of(config, **self._options)
        return self.clients[number]

    def fleet(self, num_replicas: int) -> FleetEngine:
        setup = FleetSetup(
            make=self.make,
            limits=lambda info: Limits(max_running=8, kv_tokens=16 * info.num_kv_blocks),
            policy=Policy.of("round-robin"),
            costs=costs(),
            most=(6, "there are six of everything"),
        )
        return FleetEngine(setup, num_replicas)


@asynccontextmanager
async def fleet_of(
    num_replicas: int = 3, *, restart: RestartPolicy | None = None
) -> AsyncIterator[tuple[FleetEngine, dict[int, EngineClient]]]:
    replicas = Replicas(restart=restart)
    fleet = replicas.fleet(num_replicas)
    await fleet.start()
    try:
        yield fleet, replicas.clients
    finally:
        await fleet.close()


async def tokens(fleet: FleetEngine, request: EngineRequest) -> tuple[int, ...]:
    return tuple([token async for output in fleet.generate(request) for token in output.token_ids])


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
            with pytest.raises(errors.EngineDeadError, match="3 replicas died one after the other"):
                await tokens(fleet, request_of("poison", fake_core.KILL))
            assert sum(client.status.num_restarts == 0 and client.healthy for client in clients.values()) >= 2
            request = request_of("after", max_tokens=4)
            assert await tokens(fleet, request) == tokens_of(request)

    run(scenario())


async def replica_of_stream(fleet: FleetEngine) -> int:
    """Return the number of the replica that has the one stream there is."""
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
            assert [replica.status.state for replica in fleet.replicas][1:] == [EngineState.CLOSED] * 2
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
    """Read a stream until so many requests were sent to replicas."""
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
            stats = await fleet.stats()
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


# ---- replicas that join and leave


async def served(fleet: FleetEngine, prefix: str, number: int = 12, adapter: str | None = None) -> list[int]:
    """Serve some requests and return how many each replica was sent of them."""
    before = [replica.num_sent for replica in fleet.replicas]
    for place in range(number):
        request = request_of(f"{prefix}{place}", max_tokens=2, adapter=adapter)
        assert await tokens(fleet, request) == tokens_of(request)
    return [after.num_sent - earlier for after, earlier in zip(fleet.replicas, before, strict=True)]


async def endless_streams(fleet: FleetEngine, number: int) -> list[AsyncGenerator[EngineOutput, None]]:
    """Open streams that go on until they are closed; all of them are queued."""
    streams = [fleet.generate(request_of(f"long{i}", fake_core.ENDLESS)) for i in range(number)]
    for stream in streams:
        await anext(stream)
    return streams


async def until_drained(fleet: FleetEngine, number: int) -> None:
    async def drained() -> bool:
        return fleet.replicas[number].drained

    await until(drained)


def test_a_fleet_grows_and_shrinks_while_it_serves() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, clients):
            await fleet.add_adapter(spec_of("v1"))
            stream = fleet.generate(request_of("long", fake_core.ENDLESS))
            await anext(stream)
            await fleet.scale(4)
            assert await served(fleet, "a", adapter="v1") == [3, 3, 3, 3]
            await fleet.add_adapter(spec_of("v2"))
            await fleet.scale(1)
            assert await served(fleet, "b", adapter="v2") == [12, 0, 0, 0]
            assert [replica.status.state for replica in fleet.replicas] == [
                EngineState.READY, *[EngineState.CLOSED] * 3,
            ]  # fmt: skip
            assert (await anext(stream)).token_ids, "the stream of the replica that stayed went on"
            await fleet.remove_adapter("v1")
            await fleet.scale(2)
            assert await served(fleet, "c", adapter="v2") == [6, 6, 0, 0]
            assert [row.version for row in (await clients[1].stats()).adapters] == ["v2"]
            assert fleet.replicas[0].num_in_flight == 1
            await stream.aclose()

    run(scenario())


def test_a_replica_that_joins_while_an_adapter_is_added_knows_it() -> None:
    async def scenario() -> None:
        async with fleet_of(1) as (fleet, clients):
            add, asked, may_go_on = clients[0].add_adapter, asyncio.Event(), asyncio.Event()

            async def add_slowly(spec: AdapterSpec) -> None:
                asked.set()
                await may_go_on.wait()
                await add(spec)

            clients[0].add_adapter = add_slowly  # type: ignore[method-assign]
            adding = asyncio.create_task(fleet.add_adapter(spec_of("v1")))
            await asked.wait()
            await fleet.scale(2)
            may_go_on.set()
            await adding
            assert await served(fleet, "a", adapter="v1") == [6, 6]

    run(scenario())


def test_a_replica_leaves_after_the_requests_it_has() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, clients):
            streams = await endless_streams(fleet, 2)
            leaving = asyncio.create_task(fleet.scale(1))
            await until_drained(fleet, 1)
            assert await served(fleet, "a", 4) == [4, 0]
            assert (await anext(streams[1])).token_ids
            assert clients[1].healthy
            await streams[1].aclose()
            await leaving
            assert not clients[1].healthy
            await streams[0].aclose()

    run(scenario())


def test_a_replica_is_replaced_while_the_others_serve() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, clients):
            await fleet.add_adapter(spec_of("v1"))
            before = pid_of(clients[0])
            replacing = asyncio.create_task(fleet.restart(0))
            num_served = 0
            while not replacing.done():
                num_served += sum(await served(fleet, f"r{num_served}-", 1, adapter="v1"))
            await replacing
            assert num_served > 0
            assert pid_of(clients[0]) != before
            assert await served(fleet, "after", adapter="v1") == [6, 6]

    run(scenario())


def test_a_replica_that_cannot_start_leaves_the_others_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        replicas = Replicas(None, None, FakeOptions(start_fault="model"))
        fleet = replicas.fleet(2)
        await fleet.start()
        with pytest.raises(errors.ModelError, match="no layers"):
            await fleet.scale(3)
        assert "replica 2 could not join the fleet: this model has no layers" in caplog.text
        assert await served(fleet, "a") == [6, 6]
        await fleet.close()

    run(scenario())


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (0, "one replica at least"),
        (7, "6 replicas at most: there are six"),
        (10**12, "6 replicas at most"),
    ],
)
def test_a_size_that_cannot_be_is_refused(number: int, message: str) -> None:
    async def scenario() -> None:
        async with fleet_of(1) as (fleet, _):
            with pytest.raises(errors.InvalidRequestError, match=message):
                await fleet.scale(number)

    run(scenario())


def test_the_last_replica_is_neither_drained_nor_restarted() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, _):
            await fleet.scale(1)
            with pytest.raises(errors.InvalidRequestError, match="the last one that takes requests"):
                fleet.drain(0)
            with pytest.raises(errors.InvalidRequestError, match="the last one that takes requests"):
                await fleet.restart(0)

    run(scenario())


def test_a_fleet_does_not_shrink_to_replicas_that_are_drained() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, _):
            fleet.drain(0)
            with pytest.raises(errors.InvalidRequestError, match="the last one that takes requests"):
                await fleet.scale(1)
            assert [replica.drained for replica in fleet.replicas] == [True, False]
            assert await served(fleet, "a", 4) == [0, 4]

    run(scenario())


def test_a_change_that_nobody_waits_for_any_more_is_undone() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, _):
            streams = await endless_streams(fleet, 2)
            for change in (fleet.scale(1), fleet.restart(1)):
                changing = asyncio.create_task(change)
                await until_drained(fleet, 1)
                changing.cancel()
                await asyncio.gather(changing, return_exceptions=True)
                assert not fleet.replicas[1].drained
            for stream in streams:
                await stream.aclose()
            assert await served(fleet, "a", 4) == [2, 2]

    run(scenario())


def test_changes_end_with_the_fleet() -> None:
    async def scenario() -> None:
        replicas = Replicas(None, FakeOptions(start_fault="hang", phases=("begun",)))
        fleet = replicas.fleet(1)
        await fleet.start()
        changes = [asyncio.create_task(fleet.scale(2)) for _ in range(2)]  # the second waits for the first

        async def is_starting() -> bool:
            return 1 in replicas.clients and replicas.clients[1].status.phase == "begun"

        await until(is_starting)
        await fleet.close()
        assert replicas.clients[1].status.state is EngineState.CLOSED
        for change in changes:
            with pytest.raises(errors.EngineClosedError, match="shutting down"):
                await change
        with pytest.raises(errors.EngineClosedError, match="shutting down"):
            await fleet.scale(2)

    run(scenario())


def test_a_replica_that_leaves_is_not_called_back() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, _):
            streams = await endless_streams(fleet, 2)
            leaving = asyncio.create_task(fleet.scale(1))
            await until_drained(fleet, 1)
            for change in (fleet.undrain, fleet.drain):
                with pytest.raises(errors.InvalidRequestError, match="is leaving or has left"):
                    change(1)
            with pytest.raises(errors.InvalidRequestError, match="the last one that takes requests"):
                fleet.drain(0)
            for stream in streams:
                await stream.aclose()
            await leaving
            with pytest.raises(errors.InvalidRequestError, match="is leaving or has left"):
                fleet.undrain(1)
            assert fleet.replicas[1].status.message == "it has left"

    run(scenario())
