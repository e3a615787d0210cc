"""A fleet of real engine processes that join, leave and are replaced while others serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import fake_core
import pytest
from engine_client_harness import pid_of, run, until
from engine_fleets import Replicas, fleet_of, tokens
from fake_core import FakeOptions, request_of, spec_of, tokens_of

from loraplex.core import errors
from loraplex.core.request import EngineOutput
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.fleet_engine import FleetEngine


async def served(fleet: FleetEngine, prefix: str, number: int = 12, adapter: str | None = None) -> list[int]:
    """Serve some requests and return how many each replica was sent of them."""
    before = [replica.num_sent for replica in fleet.replicas]
    for place in range(number):
        request = request_of(f"{prefix}{place}", max_tokens=2, adapter=adapter)
        assert await tokens(fleet, request) == tokens_of(request)
    return [after.num_sent - earlier for after, earlier in zip(fleet.replicas, before, strict=True)]


async def endless_streams(fleet: FleetEngine, number: int) -> list[AsyncGenerator[EngineOutput, None]]:
    """Open streams that continue until they are closed; all of them are queued."""
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
            assert await served(fleet, "b", adapter="v2") == [12]
            assert [replica.status.state for replica in fleet.replicas] == [EngineState.READY]
            assert (await anext(stream)).token_ids, "the stream of the replica that stayed went on"
            await fleet.remove_adapter("v1")
            await fleet.scale(2)
            assert await served(fleet, "c", adapter="v2") == [6, 6]
            assert [row.version for row in (await clients[1].stats()).adapters] == ["v2"]
            assert fleet.replicas[0].num_in_flight == 1
            await stream.aclose()

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
            assert [replica.number for replica in fleet.replicas] == [0]

    run(scenario())
