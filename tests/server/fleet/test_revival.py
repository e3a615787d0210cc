"""Replicas that were given up come back, and nothing waits for them meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_core import request_of, spec_of, tokens_of
from fake_replicas import FakeReplica
from replicas import run, until

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineDeadError, LoraplexError
from loraplex.fleet.policy import Policy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.members import Members
from loraplex.server.fleet.revival import RETRY_S, Revival
from loraplex.server.fleet.routing_events import Limits

FIRST_S, _ = RETRY_S


async def look(revival: Revival) -> None:
    await asyncio.gather(*revival.look())


class Started:
    """Replicas, and a Revival of them whose starts fail `num_failures` times."""

    def __init__(self, *states: EngineState, num_failures: int = 0) -> None:
        self.replicas = [FakeReplica() for _ in states]
        for replica, state in zip(self.replicas, states, strict=True):
            replica.state = state
        self.clock = ManualClock()
        self.asked: list[int] = []
        self._num_failures = num_failures
        self.members = Members(list(self.replicas))
        self.revival = Revival(self.members, self.clock, self._start)

    async def _start(self, number: int) -> None:
        self.asked.append(number)
        if len(self.asked) <= self._num_failures:
            self.replicas[number].state = EngineState.CLOSED
            raise EngineDeadError("no")
        self.replicas[number].state = EngineState.READY

    def after(self, seconds: float) -> list[int]:
        """Return the replicas that are restarted this much later."""
        self.asked.clear()
        self.clock.advance(seconds)
        asyncio.run(look(self.revival))
        return self.asked[:]


READY, FAILED = EngineState.READY, EngineState.FAILED


def test_a_failed_replica_is_started_anew_after_a_minute() -> None:
    started = Started(READY, FAILED, READY)
    assert started.after(0.0) == []
    assert started.after(FIRST_S - 1) == []
    assert started.after(1.0) == [1]
    assert started.after(1e6) == []  # it serves


def test_one_that_fails_again_is_tried_ever_more_seldom() -> None:
    started = Started(READY, FAILED, num_failures=1)
    started.after(0.0)
    assert started.after(FIRST_S) == [1]
    assert started.after(2 * FIRST_S - 1) == []
    assert started.after(1.0) == [1]


def test_nothing_is_started_when_all_have_failed() -> None:
    started = Started(FAILED, FAILED)
    started.after(0.0)
    assert started.after(2 * FIRST_S) == []


def test_one_that_is_only_drained_does_not_keep_the_others_from_being_started() -> None:
    started = Started(READY, READY)
    started.members.drain(0)
    started.replicas[1].give_up()
    started.after(0.0)
    assert started.after(FIRST_S) == [1]


def setup_of(make: Callable[[int], FakeReplica], clock: ManualClock) -> FleetSetup:
    costs = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(costs, CostModel)
    return FleetSetup(
        make=make,
        limits=lambda info: Limits(max_running=8, kv_tokens=16_000),
        policy=Policy.of("round-robin"),
        costs=costs,
        clock=clock,
    )


@pytest.mark.parametrize("is_due", [False, True])
def test_a_replica_that_is_scaled_away_does_not_come_back(is_due: bool) -> None:
    """`is_due`: its start waits for its turn behind the scaling; else it is planned while that waits."""
    made: list[FakeReplica] = []
    clock = ManualClock()

    def make(number: int) -> FakeReplica:
        made.append(FakeReplica())
        return made[-1]

    async def scenario() -> None:
        fleet, gate = FleetEngine(setup_of(make, clock), 3), asyncio.Event()
        await fleet.start()
        try:
            made[2].give_up()
            if is_due:
                await look(fleet._changes.revival)
                clock.advance(FIRST_S)

            async def change() -> None:
                await gate.wait()

            tasks = [
                asyncio.create_task(each) for each in (fleet._changes._queue.run(change()), fleet.scale(2))
            ]
            await until(lambda: len(fleet._changes._queue._tasks) == 2)
            tasks.append(asyncio.create_task(look(fleet._changes.revival)))
            await until(lambda: len(fleet._changes._queue._tasks) == 3 if is_due else tasks[2].done())
            gate.set()
            await asyncio.gather(*tasks)
            clock.advance(10 * FIRST_S)
            await look(fleet._changes.revival)
            assert ([each.number for each in fleet.replicas], len(made)) == ([0, 1], 3)
        finally:
            await fleet.close()

    run(scenario())


class StartsNot(FakeReplica):
    async def start(self, *args: object) -> None:
        self.state, self.message = EngineState.FAILED, "no memory left; free some"
        raise EngineDeadError(self.message)


def test_a_fleet_that_may_lack_replicas_starts_with_those_that_do_and_tries_the_others_again() -> None:
    made: list[FakeReplica] = []
    clock = ManualClock()

    def make(number: int) -> FakeReplica:
        made.append(StartsNot() if number == 1 and len(made) < 4 else FakeReplica())
        return made[-1]

    async def scenario() -> None:
        fleet = FleetEngine(replace(setup_of(make, clock), may_lack=True, retry_s=(5.0, 30.0)), 3)
        await fleet.add_adapter(spec_of("v"))
        await fleet.start()
        try:
            states = {each.number: each.status for each in fleet.replicas}
            assert [states[number].state for number in (0, 2)] == [EngineState.READY, EngineState.READY]
            assert states[1].state is EngineState.UNREACHABLE
            assert "no memory left" in states[1].message
            request = request_of("r", adapter="v", max_tokens=3)
            outputs = [token async for each in fleet.generate(request) for token in each.token_ids]
            assert tuple(outputs) == tuple(tokens_of(request))
            for pause_s in (5.0, 10.0):
                await look(fleet._changes.revival)
                clock.advance(pause_s)
                await look(fleet._changes.revival)
            assert [each.status.state for each in fleet.replicas] == [EngineState.READY] * 3
            assert fleet.holders("v") != []
            assert made[-1].known == {"v"}
        finally:
            await fleet.close()

    run(scenario())


def test_servers_are_looked_at_side_by_side_and_outside_of_the_queue_of_changes() -> None:
    made: list[FakeReplica] = []
    clock, silent = ManualClock(), asyncio.Event()

    def make(number: int) -> FakeReplica:
        made.append(FakeReplica() if number == 0 or len(made) > 2 else StartsNot())
        return made[-1]

    async def look_at(number: int) -> None:
        if number == 1:
            await silent.wait()
            raise EngineDeadError("it did not answer within 30 s")

    async def scenario() -> None:
        setup = replace(setup_of(make, clock), may_lack=True, look=look_at, retry_s=(5.0, 30.0))
        fleet = FleetEngine(setup, 3)
        await fleet.start()
        try:
            clock.advance(5.0)
            asked, joined = fleet._changes.revival.look()
            await joined  # although the first is still being asked
            assert [each.status.state for each in fleet.replicas] == [READY, EngineState.UNREACHABLE, READY]
            assert fleet._changes.revival.look() == []  # none is asked twice at a time
            await fleet.scale(3)
            silent.set()
            await asked
            assert [each.status.state for each in fleet.replicas] == [READY, EngineState.UNREACHABLE, READY]
        finally:
            await fleet.close()

    run(scenario())


def test_the_reason_of_the_last_look_is_shown() -> None:
    clock = ManualClock()

    async def look_at(number: int) -> None:
        raise EngineDeadError("it has another base model")

    async def scenario() -> None:
        setup = setup_of(lambda number: StartsNot() if number else FakeReplica(), clock)
        fleet = FleetEngine(replace(setup, may_lack=True, look=look_at, retry_s=(5.0, 30.0)), 2)
        await fleet.start()
        try:
            clock.advance(5.0)
            await look(fleet._changes.revival)
            message = fleet.replicas[1].status.message
            assert message == "it has another base model; it is asked again from time to time"
        finally:
            await fleet.close()

    run(scenario())


class SilentAtFirst(FakeReplica):
    """Accepts adapters when it has started, which it never does."""

    async def start(self, *args: object) -> None:
        self.state, self.message = EngineState.STARTING, "the server is being asked what it serves"
        try:
            await asyncio.Event().wait()
        finally:
            self.state = EngineState.FAILED
            self.failed.set()

    async def add_adapter(self, spec: AdapterSpec) -> None:
        await self.failed.wait()
        raise EngineDeadError(self.message)


def test_a_fleet_does_not_wait_for_servers_that_stay_silent() -> None:
    def make(number: int) -> FakeReplica:
        return FakeReplica() if number == 1 else SilentAtFirst()

    async def scenario() -> None:
        setup = setup_of(make, ManualClock())
        fleet = FleetEngine(replace(setup, may_lack=True, rest_s=0.01), 3)
        await fleet.start(None, fleet.add_adapter(spec_of("v")))
        try:
            states = [each.status.state for each in fleet.replicas]
            assert states == [EngineState.UNREACHABLE, READY, EngineState.UNREACHABLE]
            asked = "the server is being asked what it serves, and has not answered for 0.01 s; see its log"
            assert fleet.replicas[0].status.message.startswith(asked)
            await fleet.scale(3)
            assert fleet.replicas[0].status.message.startswith(asked)
            request = request_of("r", adapter="v", max_tokens=3)
            outputs = [token async for each in fleet.generate(request) for token in each.token_ids]
            assert tuple(outputs) == tuple(tokens_of(request))
        finally:
            await fleet.close()

    run(scenario())


def test_a_fleet_of_which_no_replica_starts_says_why() -> None:
    async def scenario() -> None:
        setup = setup_of(lambda number: StartsNot(), ManualClock())
        with pytest.raises(EngineDeadError, match="no memory left; free some"):
            await FleetEngine(replace(setup, may_lack=True), 2).start()

    run(scenario())


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_restart_that_comes_to_nothing_is_shown_and_tried_again(is_scaled: bool) -> None:
    made: list[FakeReplica] = []
    clock = ManualClock()

    def make(number: int) -> FakeReplica:
        made.append(StartsNot() if len(made) == 2 else FakeReplica())
        return made[-1]

    async def scenario() -> None:
        fleet = FleetEngine(setup_of(make, clock), 2)
        await fleet.start()
        try:
            with pytest.raises(LoraplexError, match=r"no memory left; free some; it is tried again .* scale"):
                await fleet.restart(1)
            shown = fleet.replicas[1].status
            assert (shown.state, "no memory left" in shown.message) == (EngineState.FAILED, True)
            if is_scaled:
                await fleet.scale(2)
            clock.advance(FIRST_S)
            await look(fleet._changes.revival)
            assert ([each.status.state for each in fleet.replicas], len(made)) == ([READY, READY], 4)
        finally:
            await fleet.close()

    run(scenario())


def test_a_fleet_takes_adapters_without_a_replica_that_was_given_up_and_gives_it_them_later() -> None:
    made: list[FakeReplica] = []
    clock = ManualClock()

    def make(number: int) -> FakeReplica:
        made.append(FakeReplica())
        return made[-1]

    setup = setup_of(make, clock)

    async def scenario() -> None:
        fleet = FleetEngine(setup, 2)
        await fleet.start()
        try:
            made[1].give_up()
            await fleet.add_adapter(spec_of("v1"))
            assert (made[0].known, made[1].known) == ({"v1"}, set())

            def is_back() -> bool:
                clock.advance(FIRST_S)
                return len(made) == 3 and made[2].healthy

            await until(is_back)
            assert made[2].known == {"v1"}
            for number in range(4):
                request = request_of(f"r{number}", adapter="v1", max_tokens=3)
                outputs = [output async for output in fleet.generate(request)]
                assert tuple(id_ for each in outputs for id_ in each.token_ids) == tokens_of(request)
            assert [each.num_sent for each in fleet.replicas] == [2, 2]
        finally:
            await fleet.close()

    run(scenario())
