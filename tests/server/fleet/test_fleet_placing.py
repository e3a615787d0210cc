"""A fleet of replicas in this process: they carry out plans, and no answer is lost by that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from fake_core import request_of, spec_of, tokens_of
from fake_replicas import FakeReplica
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineClosedError, UserError
from loraplex.core.logs import log_context
from loraplex.core.request import EngineRequest
from loraplex.fleet.live_policy import check_live_policy
from loraplex.fleet.policy import Policy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.routing_events import Limits

PERIOD_S = 60.0


class InProcess:
    """A fleet, its replicas by number, and the clock of its periods."""

    def __init__(self, policy: str, num_replicas: int) -> None:
        costs = find_profile(Path("h200-llama-2-7b"))
        assert isinstance(costs, CostModel)
        self.clock = ManualClock()
        self.replicas: dict[int, FakeReplica] = {}
        self.engine = FleetEngine(
            FleetSetup(
                make=self._make,
                limits=lambda info: Limits(max_running=64, kv_tokens=16_000),
                policy=Policy.of_name(policy),
                costs=costs,
                period_s=PERIOD_S,
                clock=self.clock,
            ),
            num_replicas,
        )

    def _make(self, number: int) -> FakeReplica:
        self.replicas[number] = FakeReplica()
        return self.replicas[number]

    def tick(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.engine.place()

    async def settle(self) -> None:
        """Run many iterations of the event loop."""
        for _ in range(200):
            await asyncio.sleep(0)

    async def answer(self, request: EngineRequest) -> tuple[int, ...]:
        outputs = self.engine.generate(request)
        return tuple([token async for output in outputs for token in output.token_ids])

    def holders(self, version: str) -> set[int]:
        """Return the replicas that the plan gives a version to."""
        assert self.engine._routing is not None
        placed = self.engine._routing.placed_on(version)
        return set() if placed is None else set(placed.replicas)


@asynccontextmanager
async def fleet_of(policy: str, num_replicas: int, num_adapters: int = 0) -> AsyncIterator[InProcess]:
    fleet = InProcess(policy, num_replicas)
    for number in range(num_adapters):
        await fleet.engine.add_adapter(spec_of(f"v{number}"))
    await fleet.engine.start()
    try:
        yield fleet
    finally:
        await fleet.engine.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("policy", "fix"),
    [
        ("most-idle", "raise --host-adapter-memory, or place fewer on each replica (--placement auto)"),
        ("most-idle+auto", "raise --host-adapter-memory, or have more replicas"),
    ],
)
def test_too_little_memory_for_a_placement_is_said_with_the_fix_and_served(
    policy: str, fix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        fleet = InProcess(policy, 2)
        for number in range(8):
            await fleet.engine.add_adapter(spec_of(f"v{number}"))
        fleet.replicas[0].memory_bytes, fleet.replicas[1].memory_bytes = 100, 512
        await fleet.engine.start()
        (short, rich) = fleet.engine.replicas
        needed = 64 * short.num_placed
        words = f"take {needed:,} bytes, {needed - 100:,} more than its memory for adapters holds; they are"
        assert words in short.status.message
        assert short.status.message.endswith(fix)
        assert rich.status.message == ""
        assert [record.getMessage() for record in caplog.records if "more than" in record.getMessage()] == [
            f"replica 0: {short.status.message}"
        ]
        for number in range(8):
            request = request_of(f"r{number}", adapter=f"v{number}")
            assert await fleet.answer(request) == tokens_of(request)
        await fleet.engine.close()

    with caplog.at_level(logging.WARNING):
        run(scenario())


@pytest.mark.parametrize(
    ("num_short", "begin"),
    [(1, "replica 0: the adapters placed on it take "), (2, "replica 0 (and 1 other like it): the adapters "),
     (3, "replica 0 (and 2 others like it): the adapters placed on it take ")],
)  # fmt: skip
def test_replicas_with_too_little_memory_are_counted_in_one_line(
    num_short: int, begin: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        fleet = InProcess("most-idle", 3)
        for number in range(8):
            await fleet.engine.add_adapter(spec_of(f"v{number}"))
        for replica, each in fleet.replicas.items():
            each.memory_bytes = 100 if replica < num_short else 512
        await fleet.engine.start()
        await fleet.engine.close()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    (line,) = (record.getMessage() for record in caplog.records if "more than" in record.getMessage())
    assert line.startswith(begin)


def test_requests_go_where_their_adapter_is_placed() -> None:
    async def scenario() -> None:
        async with fleet_of("most-idle+auto", 3, 9) as fleet:
            assert len({replica for n in range(9) for replica in fleet.holders(f"v{n}")}) == 3
            for number in range(9):
                before = [each.num_sent for each in fleet.engine.replicas]
                await fleet.answer(request_of(f"r{number}", adapter=f"v{number}"))
                after = [each.num_sent for each in fleet.engine.replicas]
                (chosen,) = [n for n in range(3) if after[n] != before[n]]
                assert chosen in fleet.holders(f"v{number}")
            assert sum(each.num_placed for each in fleet.engine.replicas) == sum(
                len(fleet.holders(f"v{n}")) for n in range(9)
            )

    run(scenario())


def test_a_new_replica_has_an_adapter_before_it_is_sent_its_requests() -> None:
    async def scenario() -> None:
        async with fleet_of("most-idle+auto", 2, 4) as fleet:
            hot = next(f"v{n}" for n in range(4) if fleet.holders(f"v{n}") == {0})
            for number in range(20):
                await fleet.answer(request_of(f"r{number}", adapter=hot, max_tokens=30))
            fleet.tick(PERIOD_S)
            assert fleet.holders(hot) == {0}, "replica 1 does not have it yet"
            await fleet.settle()
            assert hot in fleet.replicas[1].staged
            assert 1 in fleet.holders(hot)
            rows = fleet.engine.replicas
            assert rows[1].num_brought >= 1
            assert fleet.engine.num_plans == 2

    run(scenario())


def test_an_adapter_that_a_replica_cannot_bring_in_stays_where_it_is() -> None:
    async def scenario() -> None:
        async with fleet_of("most-idle+auto", 2, 4) as fleet:
            hot = next(f"v{n}" for n in range(4) if fleet.holders(f"v{n}") == {0})
            fleet.replicas[1].can_stage = False
            for period in range(2):
                for number in range(20):
                    await fleet.answer(request_of(f"r{period}-{number}", adapter=hot, max_tokens=30))
                fleet.tick(PERIOD_S)
                await fleet.settle()
                assert fleet.holders(hot) == {0}
            fleet.replicas[1].can_stage = True
            fleet.tick(PERIOD_S)
            await fleet.settle()
            assert 1 in fleet.holders(hot), "the next plan asks for it again"

    run(scenario())


def test_adapters_that_a_replica_cannot_bring_in_are_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    contexts: list[object] = []

    def note_context(record: logging.LogRecord) -> bool:
        contexts.append(log_context.get(None))
        return True

    async def scenario() -> None:
        async with fleet_of("most-idle+auto", 2, 8) as fleet:
            lost = [n for n in range(8) if fleet.holders(f"v{n}") == {1}]
            assert len(lost) > 1
            fleet.replicas[0].can_stage = False
            log_context.set({"request_id": "somebody's"})
            fleet.replicas[1].die()
            caplog.handler.addFilter(note_context)
            fleet.tick()
            await fleet.settle()
            (line,) = [each for each in caplog.messages if "does not get" in each]
            assert f"replica 0 does not get {len(lost)} of {len(lost)} adapters" in line
            assert line.endswith(": not there")

    run(scenario())
    assert contexts
    assert not any(contexts)


def test_a_replica_that_leaves_before_it_has_an_adapter_is_nothing_to_warn_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave(version: str) -> None:
        raise EngineClosedError("the server is shutting down")

    async def scenario() -> None:
        async with fleet_of("most-idle+auto", 2, 4) as fleet:
            hot = next(f"v{n}" for n in range(4) if fleet.holders(f"v{n}") == {0})
            monkeypatch.setattr(fleet.replicas[1], "stage_adapter", leave)
            for number in range(20):
                await fleet.answer(request_of(f"r{number}", adapter=hot, max_tokens=30))
            fleet.tick(PERIOD_S)
            await fleet.settle()
            assert fleet.holders(hot) == {0}

    with caplog.at_level("INFO", "loraplex.server.fleet.placing"):
        run(scenario())
    said = [each for each in caplog.records if each.name == "loraplex.server.fleet.placing"]
    assert said
    assert all(each.levelname == "INFO" and "replica 1 left before" in each.message for each in said)


def test_a_load_is_done_when_the_replicas_of_the_placement_have_it() -> None:
    async def scenario() -> None:
        async with fleet_of("most-idle+random", 3) as fleet:
            await fleet.engine.add_adapter(spec_of("new"))
            await fleet.engine.stage_adapter("new")
            (home,) = fleet.holders("new")
            assert [("new" in each.held) for each in fleet.replicas.values()] == [n == home for n in range(3)]
            other, down = sorted({0, 1, 2} - {home})
            fleet.replicas[down].die()
            words = fleet.engine.adapter_states("new")
            assert words[home] == f"replica {home}: ready"
            assert words[other] == f"replica {other}: reads it when it is asked for it"
            assert words[down] == f"replica {down}: restarting, reads it when it is back"

    run(scenario())


def test_an_adapter_whose_only_replica_is_down_is_served_elsewhere() -> None:
    async def scenario() -> None:
        async with fleet_of("round-robin+contiguous", 2, 2) as fleet:
            assert (fleet.holders("v0"), fleet.holders("v1")) == ({0}, {1})
            fleet.replicas[0].die()
            request = request_of("early", adapter="v0")
            assert await fleet.answer(request) == tokens_of(request), "before anybody has looked"
            fleet.tick()
            assert fleet.holders("v0") == {1}
            await fleet.settle()
            fleet.replicas[0].come_back()
            fleet.tick()
            assert fleet.holders("v0") == {1}, "what it had in memory is gone"
            await fleet.settle()
            assert fleet.holders("v0") == {0}
            assert fleet.replicas[0].staged == ["v0"]
            fleet.engine.drain(0)
            fleet.tick()
            assert fleet.holders("v0") == {1}

    run(scenario())


def test_a_replica_that_joins_gets_its_share() -> None:
    async def scenario() -> None:
        async with fleet_of("most-idle+random", 1, 12) as fleet:
            await fleet.engine.scale(3)
            await fleet.settle()
            assert all(each.num_placed for each in fleet.engine.replicas)
            for number in (1, 2):
                assert fleet.replicas[number].held == set(fleet.replicas[number].staged)
                assert fleet.replicas[number].held >= {
                    f"v{n}" for n in range(12) if fleet.holders(f"v{n}") == {number}
                }
            await fleet.engine.scale(2)
            fleet.tick()
            assert all(fleet.holders(f"v{n}") <= {0, 1} for n in range(12))
            assert [each.number for each in fleet.engine.replicas] == [0, 1]

    run(scenario())


async def hot_replica(fleet: InProcess) -> tuple[list[EngineRequest], list[asyncio.Task[tuple[int, ...]]]]:
    """Send all requests to replica 0, then let replica 1 take some; return them and their answers."""
    fleet.engine.drain(1)
    requests = [request_of(f"r{n}", prompt=n + 1, max_tokens=300) for n in range(40)]
    answers = [asyncio.create_task(fleet.answer(request)) for request in requests]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    fleet.engine.undrain(1)
    return requests, answers


def test_migrated_requests_answer_as_if_nothing_had_happened() -> None:
    async def scenario() -> None:
        async with fleet_of("most-idle+everywhere+migrate", 2) as fleet:
            requests, answers = await hot_replica(fleet)
            fleet.tick(10.0)
            assert await asyncio.gather(*answers) == [tokens_of(request) for request in requests]
            (_, migrated) = [each.num_migrated for each in fleet.engine.replicas]
            assert migrated > 5
            assert fleet.engine.replicas[1].num_sent == migrated
            assert [each.num_in_flight for each in fleet.engine.replicas] == [0, 0]

    run(scenario())


def test_a_request_that_its_replica_cannot_hand_over_is_not_counted_as_migrated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with fleet_of("most-idle+everywhere+migrate", 2) as fleet:
            asked: list[str | None] = []
            monkeypatch.setattr(fleet.replicas[0], "hand_over", asked.append)
            _, answers = await hot_replica(fleet)
            fleet.tick(10.0)
            assert len(asked) > 5
            await asyncio.gather(*answers)
            assert [each.num_migrated for each in fleet.engine.replicas] == [0, 0]

    run(scenario())


def test_an_adapter_is_served_also_if_there_is_no_plan_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with fleet_of("most-idle+auto", 2, 2) as fleet:
            assert fleet.engine._placing is not None

            def refuse() -> None:
                raise UserError("nobody has room for it")

            monkeypatch.setattr(fleet.engine._placing, "tick", refuse)
            for number in (2, 3):
                await fleet.engine.add_adapter(spec_of(f"v{number}"))
                request = request_of(f"r{number}", adapter=f"v{number}")
                assert await fleet.answer(request) == tokens_of(request)

    run(scenario())
    assert caplog.text.count("adapters stay where they are: nobody has room for it") == 1


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 5), st.integers(1, 60)),
        st.tuples(st.just("send many"), st.integers(0, 5), st.integers(20, 30)),
        st.tuples(st.just("turns"), st.integers(1, 30), st.just(0)),
        st.tuples(st.just("tick"), st.sampled_from((1, 10, 60)), st.just(0)),
        st.tuples(st.just("die"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("back"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("drain"), st.integers(0, 3), st.integers(0, 1)),
        st.tuples(st.just("undrain"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("add"), st.integers(3, 5), st.just(0)),
        st.tuples(st.just("join"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


class History:
    """The changes made to a fleet, and the answers requested meanwhile."""

    def __init__(self, fleet: InProcess, num_adapters: int) -> None:
        self.fleet = fleet
        self.versions = {f"v{n}" for n in range(num_adapters)}
        self.requests: list[EngineRequest] = []
        self.answers: list[asyncio.Task[tuple[int, ...]]] = []

    def send(self, adapter: int, max_tokens: int) -> None:
        version = f"v{adapter}" if f"v{adapter}" in self.versions else None
        number = len(self.requests)
        request = request_of(f"r{number}", prompt=number + 1, max_tokens=max_tokens, adapter=version)
        self.requests.append(request)
        self.answers.append(asyncio.create_task(self.fleet.answer(request)))

    async def act(self, kind: str, one: int, two: int) -> None:
        engine, replicas = self.fleet.engine, self.fleet.replicas
        others = [n for n in replicas if n != one and replicas[n].healthy and not engine.replicas[n].drained]
        match kind:
            case "send":
                self.send(one, two)
            case "send many":
                for _ in range(two):
                    self.send(one, 40)
            case "turns":
                for _ in range(one):
                    await asyncio.sleep(0)
            case "tick":
                self.fleet.tick(one)
            case "die" if one in replicas and others:
                replicas[one].die()
            case "back" if one in replicas and replicas[one].state is not None:
                replicas[one].come_back()
            case "drain" if one in replicas and others:
                engine.drain(one, move=bool(two))
            case "undrain" if one in replicas:
                engine.undrain(one)
            case "add":
                await engine.add_adapter(spec_of(f"v{one}"))
                self.versions.add(f"v{one}")
            case "join" if len(replicas) < 4:
                await engine.scale(len(replicas) + 1)


@settings(max_examples=examples(20, 40), deadline=None)
@given(
    st.sampled_from(("auto+auto+migrate", "most-idle+random+migrate", "routing-table+auto+migrate")),
    st.integers(2, 3),
    ACTIONS,
)
def test_every_answer_ends_once_and_as_undisturbed(
    policy: str, num_replicas: int, actions: list[tuple[str, int, int]]
) -> None:
    async def scenario() -> None:
        async with fleet_of(policy, num_replicas, 3) as fleet:
            history = History(fleet, 3)
            for action in actions:
                await history.act(*action)
            found = await asyncio.gather(*history.answers, return_exceptions=True)
            for request, answer in zip(history.requests, found, strict=True):
                if isinstance(answer, BaseException):  # too many replicas died with it
                    assert "died or fell silent one after the other" in str(answer)
                else:
                    assert answer == tokens_of(request)
            assert all(each.num_in_flight == 0 for each in fleet.engine.replicas)
            assert not any(replica.streams for replica in fleet.replicas.values())

    run(scenario())


@pytest.mark.parametrize(
    ("policy", "shares_memory", "words"),
    [
        ("oracle", True, "only a simulation can; serve with --routing auto"),
        ("routing-table+loraserve", True, "for minutes.*serve with --placement auto"),
        ("most-idle+burst-tolerance", False, "there is none here.*serve with --placement auto"),
    ],
)
def test_a_policy_that_no_fleet_can_serve_by_is_refused(policy: str, shares_memory: bool, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_live_policy(Policy.of_name(policy), shares_memory=shares_memory)


@pytest.mark.parametrize("policy", ["auto", "most-idle+everywhere+migrate", "most-idle+burst-tolerance"])
def test_others_are_not(policy: str) -> None:
    check_live_policy(Policy.of_name(policy), shares_memory=True)


def test_a_report_that_came_before_another_is_not_taken_for_a_new_engine() -> None:
    async def scenario() -> None:
        async with fleet_of("most-idle+random", 2) as fleet:
            first, second = fleet.replicas[0], fleet.replicas[1]
            first.num_steps, second.stats_gate = 100, (gate := asyncio.Event())
            early = asyncio.create_task(fleet.engine.stats())
            await fleet.settle()
            first.num_steps = 150
            assert (await fleet.engine.stats()).num_steps == 150
            gate.set()
            assert (await early).num_steps == 150
            assert (await fleet.engine.stats()).num_steps == 150

    run(scenario())
