"""Requests of tenants in front of servers that know none: these wait at the front, in the order of fair
shares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_core import request_of
from replicas import BASE, answer, request_for, run, spec_in, until
from server_fixtures import SHAPE
from vllm_dialect import VllmDialect

from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineDeadError
from loraplex.core.request import EngineOutput
from loraplex.core.tenants import BATCH_PRIORITY, TenantPolicy
from loraplex.fleet.policy import Policy
from loraplex.scheduling.fair_turns import MAX_UNSTARTED as ROOM
from loraplex.server.fleet.backend_replicas import Backends, backend_fleet
from loraplex.server.fleet.fair_turns import WaitForTurns
from loraplex.server.fleet.fleet_engine import FleetEngine

# ---- the order in front of one server


class Front:
    """The front of a server, which answers nothing while `answers` is cleared."""

    def __init__(self, *policies: TenantPolicy) -> None:
        self.turns = WaitForTurns(ManualClock())
        self.turns.set_tenants(policies)
        self.answers = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.present: set[str] = set()
        self.ended: list[str] = []

    async def send(self, tenant: str, count: int, priority: int = 0) -> None:
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._run(tenant, priority, f"{tenant}{len(self.tasks)}")))
        await settled()

    async def _run(self, tenant: str, priority: int, name: str) -> None:
        turn = await self.turns.wait(replace(request_of(name), tenant=tenant, priority=priority), 0.0)
        self.present.add(name)
        try:
            for _ in range(4):
                await self.answers.wait()
                self.turns.got(turn, (1,))
                await asyncio.sleep(0)
        finally:
            self.present.discard(name)
            self.turns.leave(turn)
        self.ended.append(name)

    def sent(self, tenant: str) -> int:
        """Return how many requests of a tenant the server has."""
        return sum(each.startswith(tenant) for each in self.present)

    async def finish(self) -> None:
        self.answers.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert not self.present
        assert self.turns.num_waiting == 0


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_tenant_with_many_requests_keeps_no_other_one_waiting_behind_them() -> None:
    async def scenario() -> None:
        front = Front(TenantPolicy(name="many"), TenantPolicy(name="few"))
        await front.send("many", 4 * ROOM)
        await front.send("few", 2)
        assert (front.sent("many"), front.sent("few")) == (ROOM, 0), "the others wait at the front"
        await front.finish()
        assert max(front.ended.index(each) for each in front.ended if each.startswith("few")) < 2 * ROOM

    asyncio.run(scenario())


def test_shares_and_priorities_hold_at_the_front() -> None:
    async def scenario() -> None:
        front = Front(TenantPolicy(name="big", share=3.0), TenantPolicy(name="late", priority=1))
        await front.send("late", 2 * ROOM)
        await front.send("small", 40)
        await front.send("big", 40)
        await front.finish()
        first = front.ended[ROOM : ROOM + 40]
        assert 26 <= sum(each.startswith("big") for each in first) <= 34, "three quarters"
        assert all(each.startswith("late") for each in front.ended[-ROOM:])

    asyncio.run(scenario())


def test_lines_of_batches_wait_for_all_live_requests() -> None:
    async def scenario() -> None:
        front = Front()
        await front.send("line", 3 * ROOM, priority=BATCH_PRIORITY)
        await front.send("live", 5)
        assert front.sent("line") == ROOM
        await front.finish()
        assert max(front.ended.index(each) for each in front.ended if each.startswith("live")) < 2 * ROOM

    asyncio.run(scenario())


def test_nothing_waits_where_nothing_competes() -> None:
    async def scenario() -> None:
        front = Front()
        await front.send("a", 3 * ROOM)
        assert front.sent("a") == 3 * ROOM
        await front.finish()

    asyncio.run(scenario())


def test_nothing_waits_when_the_tenants_are_removed() -> None:
    async def scenario() -> None:
        front = Front(TenantPolicy(name="a"))
        await front.send("a", 3 * ROOM)
        assert front.sent("a") == ROOM
        front.turns.set_tenants(())
        await settled()
        assert front.sent("a") == 3 * ROOM
        await front.finish()

    asyncio.run(scenario())


@pytest.mark.parametrize("leaving", [slice(0, ROOM), slice(ROOM, None), slice(3, None, 2)])
def test_who_leaves_frees_its_turn(leaving: slice) -> None:
    """Requests that are sent, that wait, and some of both."""

    async def scenario() -> None:
        front = Front(TenantPolicy(name="a"))
        await front.send("a", 4 * ROOM)
        for task in front.tasks[leaving]:
            task.cancel()
        await settled()
        assert front.sent("a") == ROOM
        await front.send("b", 1)
        await front.finish()
        assert len(front.ended) == 4 * ROOM + 1 - len(range(4 * ROOM)[leaving])

    asyncio.run(scenario())


def test_who_leaves_just_as_its_turn_comes_frees_it() -> None:
    async def scenario() -> None:
        front = Front(TenantPolicy(name="a"))
        await front.send("a", ROOM + 2)
        front.tasks[0].cancel()
        await asyncio.sleep(0)  # its place is given to the first that waits, which is not awake yet
        front.tasks[ROOM].cancel()
        await settled()
        assert front.sent("a") == ROOM
        await front.finish()

    asyncio.run(scenario())


# ---- fleets of servers


@asynccontextmanager
async def fleet_in_front(num_servers: int) -> AsyncIterator[tuple[list[VllmDialect], FleetEngine]]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(VllmDialect()) for _ in range(num_servers)]
        backends = Backends(urls=tuple(server.url for server in servers))
        fleet = backend_fleet(backends, base_names=[BASE], shape=SHAPE, policy=Policy.of("round-robin"))
        await fleet.start()
        stack.push_async_callback(fleet.close)
        fleet.set_tenants([TenantPolicy(name="a"), TenantPolicy(name="b")])
        yield servers, fleet


def ask(
    fleet: FleetEngine, tenant: str, count: int, adapter: str | None = None
) -> list[asyncio.Task[EngineOutput]]:
    return [
        asyncio.create_task(answer(fleet, replace(request_for([5], adapter=adapter), tenant=tenant)))
        for _ in range(count)
    ]


def num_streams(server: VllmDialect) -> int:
    return sum(bool(body.get("stream")) for body in server.bodies("/completions"))


def test_a_server_that_answers_nothing_keeps_nobody_from_another() -> None:
    async def scenario() -> None:
        async with fleet_in_front(2) as (servers, fleet):
            servers[0].does.answer_gate = asyncio.Event()
            asked = ask(fleet, "a", 4 * ROOM)
            await until(lambda: sum(task.done() for task in asked) == 2 * ROOM)
            await ask(fleet, "b", 2)[1]
            assert num_streams(servers[0]) == ROOM
            silent = fleet._members[0]
            silent._watch.drops.set_aside("it is silent", is_cut=False)  # type: ignore[attr-defined]
            silent.hand_over_stalled([])
            await until(lambda: sum(task.done() for task in asked) == 3 * ROOM)
            assert num_streams(servers[0]) == ROOM, "what waited for it is served elsewhere"
            servers[0].does.answer_gate.set()
            await asyncio.gather(*asked)

    run(scenario())


def test_requests_whose_adapter_is_being_loaded_keep_nobody_waiting(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet_in_front(1) as ([server], fleet):
            spec = spec_in(tmp_path / "one")
            await fleet.add_adapter(spec)
            server.does.num_forgotten, server.does.load_gate = 1, asyncio.Event()
            asked = ask(fleet, "a", 3 * ROOM, spec.version)
            await until(lambda: len(server.bodies("/load_lora_adapter")) == 2)
            await asyncio.gather(*ask(fleet, "b", 2))
            assert not any(task.done() for task in asked)
            server.does.load_gate.set()
            await asyncio.gather(*asked)

    run(scenario())


def test_all_that_wait_fail_at_once_when_no_server_comes_back() -> None:
    async def scenario() -> None:
        async with fleet_in_front(1) as ([server], fleet):
            clock = fleet._requests._clock = ManualClock()
            await server.stop()
            await until(lambda: not fleet._members.serving)
            asked = ask(fleet, "a", 3 * ROOM)
            await settled()
            clock.advance(200.0)
            for task in asked:
                with pytest.raises(EngineDeadError, match="no replica took the request within 180 s"):
                    await task

    run(scenario())


def test_what_waits_at_a_server_is_served_when_it_is_back_or_the_fleet_is_closed() -> None:
    async def scenario() -> None:
        async with fleet_in_front(1) as ([server], fleet):
            server.does.answer_gate = asyncio.Event()
            asked = ask(fleet, "a", 3 * ROOM)
            await until(lambda: num_streams(server) == ROOM)
            fleet._members[0]._watch.lose("it is silent")  # type: ignore[attr-defined]
            await until(lambda: num_streams(server) == 2 * ROOM)
            asked[0].cancel()
            server.does.answer_gate.set()
            await asyncio.gather(*asked[1:])
            server.does.answer_gate.clear()
            before, left = num_streams(server), ask(fleet, "b", 3 * ROOM)
            await until(lambda: num_streams(server) == before + ROOM)
            await fleet.close()
            for problem in await asyncio.gather(*left, return_exceptions=True):
                assert isinstance(problem, EngineDeadError)

    run(scenario())
