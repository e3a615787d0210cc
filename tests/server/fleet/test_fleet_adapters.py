"""Adapters that are added while replicas join and leave, and a fleet whose management has a bug."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from engine_fleets import costs
from fake_core import FakeOptions, request_of, spec_of, tokens_of
from fake_replicas import FakeReplica
from replicas import run, until

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineClosedError
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.fleet.policy import Policy
from loraplex.perf.profile_json import profile_to_json
from loraplex.server.adapter_metrics import render_adapters
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members
from loraplex.server.fleet.routing_events import Began, Limits
from loraplex.server.metrics import ServerMetrics
from loraplex.server.served_adapter import ServedAdapter
from loraplex.server.sole_engine import SoleEngine


class GatedReplica(FakeReplica):
    """A replica that accepts adapters, and reports those it has, while its gates are open."""

    def __init__(self) -> None:
        super().__init__()
        self.takes_adapters = asyncio.Event()
        self.takes_adapters.set()
        self.num_asked = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.bug: Exception | None = None

    async def add_adapter(self, spec: AdapterSpec) -> None:
        await self.takes_adapters.wait()
        if self.state is EngineState.CLOSED:
            raise EngineClosedError("closed")
        await super().add_adapter(spec)

    async def close(self) -> None:
        await super().close()
        self.takes_adapters.set()

    async def stats(self) -> EngineStats:
        self.num_asked += 1
        if self.bug is not None:
            raise self.bug
        await self.answers.wait()
        return await super().stats()


@asynccontextmanager
async def fleet_of(num_replicas: int) -> AsyncIterator[tuple[FleetEngine, list[GatedReplica]]]:
    """A fleet, and its replicas in the order in which they were made."""
    made: list[GatedReplica] = []

    def make(number: int) -> GatedReplica:
        made.append(GatedReplica())
        return made[-1]

    setup = FleetSetup(
        make=make,
        limits=lambda info: Limits(max_running=8, kv_tokens=16_000),
        policy=Policy.of("round-robin"),
        costs=costs(),
    )
    fleet = FleetEngine(setup, num_replicas)
    await fleet.start()
    try:
        yield fleet, made
    finally:
        await fleet.close()


def test_a_replica_that_joins_while_an_adapter_is_added_gets_it_as_well() -> None:
    async def scenario() -> None:
        async with fleet_of(1) as (fleet, made):
            made[0].takes_adapters.clear()
            adding = asyncio.create_task(fleet.add_adapter(spec_of("v1")))
            await fleet.scale(2)
            assert not adding.done()
            made[0].takes_adapters.set()
            await adding
            assert [each.known for each in made] == [{"v1"}, {"v1"}]

    run(scenario())


def test_a_replica_that_is_replaced_while_an_adapter_is_added_does_not_stop_it() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (fleet, made):
            made[1].takes_adapters.clear()
            adding = asyncio.create_task(fleet.add_adapter(spec_of("v1")))
            await fleet.restart(1)
            await adding
            assert [each.known for each in made] == [{"v1"}, set(), {"v1"}]

    run(scenario())


def test_it_is_shown_where_adapters_are() -> None:
    async def scenario() -> None:
        async with fleet_of(3) as (fleet, made):
            for version in ("v1", "v2"):
                await fleet.add_adapter(spec_of(version))
            await fleet.stage_adapter("v1")
            assert (fleet.holders("v1"), fleet.holders("v2")) == ([0, 1, 2], [])
            made[1].die()
            fleet.place()
            assert fleet.holders("v1") == [0, 2]
            adapter = ServedAdapter(name="bot", spec=spec_of("v1"))
            page = render_adapters(
                [adapter], ServerMetrics(ManualClock()), await fleet.stats(), fleet.holders
            )
            shown = [line for line in page.decode().splitlines() if "adapter_on_replica{" in line]
            assert shown == [
                f'loraplex:adapter_on_replica{{adapter="bot",replica="{n}",version="v1"}} 1' for n in (0, 2)
            ]

    run(scenario())


def test_loads_of_a_replica_only_grow() -> None:
    members = Members([FakeReplica()])
    for version in "abc":
        members.know(version)

    def report(**loads: int) -> int:
        rows = [
            AdapterStats(version=version, tier="host", num_bytes=1, in_flight=0, loads=count)
            for version, count in loads.items()
        ]
        members.saw(0, EngineStats(adapters=tuple(rows), adapter_fetches=3))
        (status,) = members.statuses(lambda number: 0)
        assert status.num_fetches == 3
        return status.num_loads

    assert report(a=2, b=1) == 3
    assert report(b=1) == 3, "a version that is removed takes nothing with it"
    assert report(b=4, c=1) == 7
    assert report(b=1) == 8, "its engine has started anew"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.fleet.fleet_engine._LOOK_S", 0.001)


@pytest.mark.usefixtures("impatient")
def test_a_replica_that_does_not_say_what_it_holds_delays_nobody() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as (_, made):
            made[0].answers.clear()
            before = made[1].num_asked
            await until(lambda: made[1].num_asked > before)
            assert made[0].healthy, "it serves, and is only slow to say what it holds"
            made[0].answers.set()

    run(scenario())


@pytest.mark.usefixtures("impatient")
def test_versions_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.fleet.live_routing._MAX_GONE", 3)

    async def scenario() -> None:
        async with fleet_of(2) as (fleet, _):
            for number in range(12):
                await fleet.add_adapter(spec_of(f"v{number}"))
                await fleet.stage_adapter(f"v{number}")
                if number:
                    await fleet.remove_adapter(f"v{number}")
            routing = fleet._routing
            assert routing is not None
            await until(
                lambda: len(routing._numbers) <= 4
            )  # as many as may be removed, and the one that is there
            assert set(routing._held._held) == {(0, "v0"), (1, "v0")}
            request = request_of("r", adapter="v0")
            outputs = [output async for output in fleet.generate(request)]
            assert tuple(token for each in outputs for token in each.token_ids) == tokens_of(request)

    run(scenario())


def test_a_single_server_forgets_versions_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.fleet.live_routing._MAX_GONE", 3)

    async def scenario() -> None:
        engine = SoleEngine(FakeOptions())
        limits = [Limits(max_running=8, kv_tokens=16_000)]
        began = Began(policy="round-robin", limits=limits, costs=profile_to_json(costs()), mean_tokens=64.0)
        engine._load = LiveRouting([began])
        for number in range(20):
            engine._load.add(spec_of(f"v{number}"))
            if number:
                await engine.remove_adapter(f"v{number}")
        assert len(engine._load._numbers) <= 5

    run(scenario())


@pytest.mark.usefixtures("impatient")
def test_a_bug_in_the_management_is_logged_and_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with fleet_of(1) as (_, made):
            made[0].bug = RuntimeError("a bug")
            await until(lambda: "it is started again" in caplog.text)
            made[0].bug = None
            before = made[0].num_asked
            await until(lambda: made[0].num_asked > before + 1)

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "RuntimeError: a bug" in caplog.text
