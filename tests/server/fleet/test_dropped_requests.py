"""Servers that report to be healthy but drop requests: set aside for a while, and tried again."""

from __future__ import annotations

import asyncio
import logging

import pytest
from replicas import BASE, answer, replica_of, request_for, run, started, until
from server_fixtures import SHAPE
from vllm_dialect import VllmDialect, tokens_of

from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineDeadError
from loraplex.fleet.policy import Policy
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.backend_errors import NotAcceptedError
from loraplex.server.fleet.backend_replicas import Backends, backend_fleet
from loraplex.server.fleet.dropped_requests import DroppedRequests
from loraplex.server.fleet.fleet_engine import FleetEngine


def fleet_of(*servers: VllmDialect) -> FleetEngine:
    backends = Backends(urls=tuple(server.url for server in servers))
    return backend_fleet(backends, base_names=[BASE], shape=SHAPE, policy=Policy.of("round-robin"))


def test_pauses_grow_until_a_request_is_answered() -> None:
    clock = ManualClock()
    drops = DroppedRequests(clock, (1.0, 3.0))

    def drop() -> bool:
        return drops.dropped(drops.era, "cut", is_cut=True)

    assert [drop(), drop()] == [False, False]
    assert not drops.dropped(drops.era - 1, "cut", is_cut=True), "it was under way with the one before"
    assert drop()
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        clock.advance(pause_s - 0.5)
        assert not drops.is_due
        clock.advance(0.5)
        assert drops.is_due
        drops.try_again()
        assert (drops.reason, drop()) == (None, True)
    drops.answered()
    assert (drops.reason, drop(), drop(), drop()) == (None, False, False, True)
    clock.advance(1.0)
    assert drops.is_due


def test_a_server_that_drops_requests_is_set_aside_and_its_streams_go_on() -> None:
    async def scenario() -> None:
        async with VllmDialect() as server, started(server.url, aside_s=(0.01, 0.02)) as replica:
            server.does.pause_after = 2
            stream = asyncio.create_task(answer(replica, request_for([7])))
            await server.paused.wait()
            server.does.drops = True
            for _ in range(3):
                with pytest.raises(NotAcceptedError):
                    await answer(replica, request_for([5]))
            num_asked = len(server.bodies("/completions"))
            await until(lambda: len(server.bodies("/completions")) > num_asked)  # tried, without success
            status = replica.status
            assert (replica.healthy, status.state, status.is_dropping) == (
                False,
                EngineState.UNREACHABLE,
                True,
            )
            assert f"{server.url} closed the connection without an answer" in status.message
            assert "see its log" in status.message
            server.does.drops = False
            await until(lambda: replica.healthy)
            server.does.resume.set()
            assert list((await stream).token_ids) == tokens_of(BASE, [7], 8)
            assert list((await answer(replica, request_for([5]))).token_ids) == tokens_of(BASE, [5], 8)

    run(scenario())


def test_others_serve_without_a_line_for_every_request(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with VllmDialect() as bad, VllmDialect() as good:
            fleet = fleet_of(bad, good)
            await fleet.start()
            bad.does.drops = True
            for _ in range(20):
                output = await answer(fleet, request_for([5]))
                assert list(output.token_ids) == tokens_of(BASE, [5], 8)
            assert fleet.replicas[0].num_sent <= 4
            await fleet.close()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert sum("goes on elsewhere" in record.getMessage() for record in caplog.records) <= 4


def test_the_client_is_told_when_every_server_drops_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.fleet.fleet_requests._BUSY_S", 0.001)
    monkeypatch.setattr("loraplex.server.fleet.fleet_requests._MAX_DROPPED_S", 0.0)

    async def scenario() -> None:
        async with VllmDialect() as one, VllmDialect() as two:
            fleet = fleet_of(one, two)
            await fleet.start()
            one.does.drops = two.does.drops = True
            with pytest.raises(
                EngineDeadError,
                match=r"no replica took the request .*(drops requests|completes no prompt) .*see",
            ):
                await answer(fleet, request_for([5]))
            await fleet.close()

    run(scenario())


def test_a_server_that_says_it_is_not_ready_is_waited_for_as_one_that_is_away() -> None:
    async def scenario() -> None:
        async with VllmDialect() as server:
            replica = replica_of(server.url, aside_s=(10.0, 10.0))
            await replica.start()
            server.does.failure = (503, "ServiceUnavailable", "starting")
            for _ in range(3):
                with pytest.raises(NotAcceptedError):
                    await answer(replica, request_for([5]))
            assert (replica.status.state, replica.status.is_dropping) == (EngineState.UNREACHABLE, False)
            await replica.close()

    run(scenario())
