"""Requests of tenants in front of servers that know none: these wait at the front, in the order of fair
shares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from engine_fleets import costs
from fake_core import request_of
from fake_replicas import FakeReplica

from loraplex.core.errors import EngineClosedError
from loraplex.core.tenants import BATCH_PRIORITY, TenantPolicy
from loraplex.fleet.policy import Policy
from loraplex.server.fleet.fair_turns import _UNSTARTED_PER_SERVER as ROOM
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.routing_events import Limits


class Servers:
    """A fleet in front of one server, which is sent requests but answers nothing at first."""

    def __init__(self, *, are_servers: bool = True) -> None:
        self.server = FakeReplica()
        self.server.pause.clear()
        setup = FleetSetup(
            make=lambda number: self.server,
            limits=lambda info: Limits(max_running=8, kv_tokens=100_000),
            policy=Policy.of("most-idle"),
            costs=costs(),
            no_restart="there is none",
            may_lack=are_servers,
        )
        self.fleet = FleetEngine(setup, 1)
        self.tasks: list[asyncio.Task[None]] = []
        self.ended: list[str] = []

    async def send(self, tenant: str, count: int, priority: int = 0) -> None:
        for _ in range(count):
            name = f"{tenant}{len(self.tasks)}"
            request = replace(request_of(name), tenant=tenant, priority=priority)
            self.tasks.append(asyncio.create_task(self._run(name, request)))
        await settled()

    async def _run(self, name: str, request: object) -> None:
        async for _ in self.fleet.generate(request):  # type: ignore[arg-type]
            pass
        self.ended.append(name)

    def sent(self, tenant: str) -> int:
        """Return how many requests of a tenant the server has."""
        return sum(each.startswith(tenant) for each in self.server.streams)


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@asynccontextmanager
async def servers(*policies: TenantPolicy, are_servers: bool = True) -> AsyncIterator[Servers]:
    made = Servers(are_servers=are_servers)
    await made.fleet.start()
    made.fleet.set_tenants(policies)
    try:
        yield made
    finally:
        made.server.pause.set()
        await made.fleet.close()
        await asyncio.gather(*made.tasks, return_exceptions=True)


def test_a_tenant_with_many_requests_keeps_no_other_one_waiting_behind_them() -> None:
    async def run() -> None:
        async with servers(TenantPolicy(name="many"), TenantPolicy(name="few")) as made:
            await made.send("many", 4 * ROOM)
            await made.send("few", 2)
            assert (made.sent("many"), made.sent("few")) == (ROOM, 0), "the others wait at the front"
            made.server.pause.set()
            await asyncio.gather(*made.tasks)
            of_few = [made.ended.index(each) for each in made.ended if each.startswith("few")]
            assert max(of_few) < 2 * ROOM

    asyncio.run(run())


def test_shares_and_priorities_hold_at_the_front() -> None:
    async def run() -> None:
        policies = (TenantPolicy(name="big", share=3.0), TenantPolicy(name="late", priority=1))
        async with servers(*policies) as made:
            await made.send("late", 2 * ROOM)
            await made.send("small", 40)
            await made.send("big", 40)
            made.server.pause.set()
            await asyncio.gather(*made.tasks)
            first = made.ended[ROOM : ROOM + 40]
            of_big = sum(each.startswith("big") for each in first)
            assert 26 <= of_big <= 34, "three quarters"
            assert all(each.startswith("late") for each in made.ended[-ROOM:])

    asyncio.run(run())


def test_lines_of_batches_wait_for_all_live_requests() -> None:
    async def run() -> None:
        async with servers() as made:
            await made.send("line", 3 * ROOM, priority=BATCH_PRIORITY)
            await made.send("live", 5)
            assert made.sent("line") == ROOM
            made.server.pause.set()
            await asyncio.gather(*made.tasks)
            assert max(made.ended.index(each) for each in made.ended if each.startswith("live")) < 2 * ROOM

    asyncio.run(run())


@pytest.mark.parametrize("are_servers", [True, False])
def test_nothing_waits_where_nothing_competes_or_engines_know_tenants(are_servers: bool) -> None:
    async def run() -> None:
        policies = () if are_servers else (TenantPolicy(name="a"),)
        async with servers(*policies, are_servers=are_servers) as made:
            await made.send("a", 3 * ROOM)
            assert made.sent("a") == 3 * ROOM

    asyncio.run(run())


def test_who_leaves_frees_its_turn_and_a_closed_fleet_ends_all() -> None:
    async def run() -> None:
        async with servers(TenantPolicy(name="a")) as made:
            await made.send("a", ROOM + 3)
            waiting, sent = made.tasks[-1], made.tasks[0]
            waiting.cancel()
            sent.cancel()
            await settled()
            assert made.sent("a") == ROOM
            await made.fleet.close()
            with pytest.raises(EngineClosedError):
                await made.tasks[-2]

    asyncio.run(run())
