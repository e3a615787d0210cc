"""Random histories of a live fleet's routing: whatever comes and goes, every adapter has a replica that
serves it, and a replay of its log makes the same decisions."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
from examples import examples
from fake_core import spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.continuation import attempt_id
from loraplex.fleet.plan import Entry
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.perf.profile_json import profile_to_json
from loraplex.server.fleet.explain import replayed
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.routing_events import (
    Began,
    Limits,
    RoutingEvent,
    Sent,
    Ticked,
    decode_event,
    encode_event,
)

LIMITS = Limits(max_running=4, kv_tokens=2048)
POLICIES = (
    "auto",
    "auto+auto+migrate",
    "most-idle+random",
    "rank-aware+contiguous",
    "routing-table+auto+migrate",
    "pending-time+burst-tolerance+migrate",
    "round-robin+everywhere+migrate",
)
PERIOD_S = 15.0


def began(policy: str, num_replicas: int) -> Began:
    costs = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(costs, CostModel)
    return Began(
        policy=policy,
        limits=[LIMITS] * num_replicas,
        costs=profile_to_json(costs),
        mean_tokens=50.0,
        period_s=PERIOD_S,
        device_bytes=10_000,
    )


class LiveFleet:
    """A fleet as its routing sees it, and its invariants."""

    def __init__(self, policy: str, num_replicas: int) -> None:
        self.logs: list[list[RoutingEvent]] = [[began(policy, num_replicas)]]
        self.routing = LiveRouting(self.logs[0], lambda event: self.logs[-1].append(event))
        self.serving = set(range(num_replicas))
        self.now_s = 0.0
        self.versions: set[str] = set()
        self.replica_of: dict[str, int] = {}  # of requests in flight, by the id of their last attempt
        self.num_output: dict[str, int] = {}
        self.asked: list[tuple[int, str]] = []  # the loads in progress
        self.moved_s: dict[str, float] = {}
        self.num_sent = self.num_ended = 0
        self._numbers = count()
        self.tick()

    def tick(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        tick = self.routing.tick(self.now_s, self.serving, lambda: dict(self.num_output))
        if tick is None:
            return
        self.asked += tick.stages
        for move in tick.event.moves:
            name = move.request_id
            assert self.now_s - self.moved_s.get(name, -1e9) >= 30.0, "it was moved lately"
            self.moved_s[name] = self.now_s
            (last,) = [each for each in self.replica_of if each.partition("+")[0] == name]
            self.end(last, None)
            self.send(attempt_id(name, next(self._numbers)), None, 40, to=move.target)

    def send(self, request_id: str, version: str | None, prompt_tokens: int, to: int | None = None) -> None:
        chosen = self.routing.route(request_id, version, prompt_tokens, to=to)
        assert chosen in self.serving or to is not None
        self.replica_of[request_id] = chosen
        self.num_output[request_id.partition("+")[0]] = 0
        self.num_sent += 1

    def end(self, request_id: str, num_tokens: int | None) -> None:
        del self.replica_of[request_id], self.num_output[request_id.partition("+")[0]]
        self.routing.ended(request_id, num_tokens)
        self.num_ended += 1

    def lose(self, replica: int) -> None:
        """Let a replica die or leave; the others continue its requests."""
        if self.serving == {replica}:
            return
        self.serving.discard(replica)
        self.routing.accept(replica, accepts=False)
        self.routing.lost(replica)
        for request_id in [each for each, where in self.replica_of.items() if where == replica]:
            self.end(request_id, None)
            self.send(attempt_id(request_id.partition("+")[0], next(self._numbers)), None, 30)

    def begin_anew(self) -> None:
        self.logs.append(list(self.routing.state()))
        self.routing.begin(self.logs[-1])

    def check(self) -> None:
        view = self.routing.view
        view.load.check_integrity()
        for version in self.versions:
            placed = self.routing.placed_on(version)
            if placed is not None:
                assert abs(sum(placed.shares) - 1) < 1e-9
                assert all(share > 0 for share in placed.shares)
                assert set(placed.replicas) & self.serving, f"nobody serves {version}"
            accepting = view.candidates(self.routing.request_of(version, 1))
            assert set(np.asarray(accepting).tolist()) <= self.serving


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 9), st.integers(1, 900)),
        st.tuples(st.just("first"), st.integers(0, 30), st.integers(1, 40)),
        st.tuples(st.just("end"), st.integers(0, 30), st.integers(0, 300)),
        st.tuples(st.just("add"), st.integers(0, 8), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 8), st.just(0)),
        st.tuples(st.just("tick"), st.integers(1, 20), st.just(0)),
        st.tuples(st.just("stage"), st.integers(0, 30), st.integers(0, 4)),
        st.tuples(st.just("lose"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("back"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("join"), st.just(0), st.just(0)),
        st.tuples(st.just("give"), st.integers(0, 9), st.integers(0, 3)),
        st.tuples(st.just("anew"), st.just(0), st.just(0)),
    ),
    max_size=80,
)


def act(fleet: LiveFleet, kind: str, one: int, two: int) -> None:
    routing, versions = fleet.routing, sorted(fleet.versions)
    requests = sorted(fleet.replica_of)
    match kind:
        case "send":
            version = versions[one % len(versions)] if versions and one else None
            fleet.send(f"r{next(fleet._numbers)}", version, two)
        case "first" if requests:
            request_id = requests[one % len(requests)]
            routing.first_token(request_id)
            fleet.num_output[request_id.partition("+")[0]] += two
        case "end" if requests:
            fleet.end(requests[one % len(requests)], two or None)
        case "add":
            routing.add(spec_of(f"v{one}"))
            fleet.versions.add(f"v{one}")
            fleet.tick()  # as a fleet does at once
        case "remove":
            routing.remove(f"v{one}")
            fleet.versions.discard(f"v{one}")
        case "tick":
            fleet.tick(float(one))
        case "stage" if fleet.asked:
            replica, version = fleet.asked.pop(one % len(fleet.asked))
            routing.staged(replica, version, is_there=replica in fleet.serving and two > 0)
        case "lose":
            if one < routing.view.load.num_replicas:
                fleet.lose(one)
                fleet.tick()
        case "back" if one < routing.view.load.num_replicas and one not in fleet.serving:
            fleet.serving.add(one)
            routing.accept(one, accepts=True)
            fleet.tick()
        case "join" if routing.view.load.num_replicas < 6:
            gone = sorted(set(range(routing.view.load.num_replicas)) - fleet.serving)
            number = gone[0] if gone else routing.view.load.num_replicas
            routing.join(number, LIMITS)
            fleet.serving.add(number)
            fleet.tick()
        case "give" if routing.has_placement:
            routing.give({} if one == 0 else spread(versions[::2], routing.view.load.num_replicas, one, two))
            fleet.tick()
        case "anew":
            fleet.begin_anew()


def spread(versions: list[str], num_replicas: int, first: int, num_more: int) -> dict[str, Entry]:
    """Return a placement of versions on one replica after the other, each on up to `num_more` others too."""
    return {
        version: Entry.of_weights(
            {(first + place + more) % num_replicas: 1.0 for more in range(num_more + 1)}
        )
        for place, version in enumerate(versions)
    }


@settings(max_examples=examples(30, 60), deadline=None)
@given(st.sampled_from(POLICIES), st.integers(1, 3), ACTIONS)
def test_whatever_comes_and_goes_every_adapter_is_served(
    policy: str, num_replicas: int, actions: list[tuple[str, int, int]]
) -> None:
    fleet = LiveFleet(policy, num_replicas)
    for action in actions:
        act(fleet, *action)
        fleet.check()
    for request_id in sorted(fleet.replica_of):
        fleet.end(request_id, 5)
    assert fleet.routing.view.load.is_empty
    assert fleet.num_ended == fleet.num_sent
    num_decisions = 0
    for log in fleet.logs:
        read = [decode_event(encode_event(event)) for event in log]
        assert read == log
        for decision, again in replayed(read):
            assert again == decision
            num_decisions += isinstance(decision, Sent)
    assert num_decisions == fleet.num_sent


def settle(fleet: LiveFleet) -> None:
    """Complete all loads that replicas were asked for."""
    while fleet.asked:
        replica, version = fleet.asked.pop()
        fleet.routing.staged(replica, version, is_there=True)


def test_a_period_moves_adapters_to_where_they_are_asked_for() -> None:
    """All requests go to those of six adapters that are on one of two replicas."""
    fleet = LiveFleet("most-idle+auto", 2)
    for number in range(6):
        act(fleet, "add", number, 0)
    home = {version: fleet.routing.placed_on(version) for version in fleet.versions}
    hot = [version for version, entry in home.items() if entry is not None and entry.replicas == (0,)]
    assert 0 < len(hot) < 6
    for number in range(60):
        fleet.send(f"hot{number}", hot[number % len(hot)], 500)
        fleet.end(f"hot{number}", 100)
    fleet.tick(PERIOD_S)
    moving = {version for _, version in fleet.asked}
    assert moving, "nothing moves"
    for version in moving:
        assert fleet.routing.placed_on(version) == home[version], "it moves when its new replica has it"
    settle(fleet)
    for version in moving & set(hot):
        entry = fleet.routing.placed_on(version)
        assert entry is not None
        assert 1 in entry.replicas


def test_a_replica_that_is_gone_leaves_its_adapters_to_the_others_at_once() -> None:
    fleet = LiveFleet("rank-aware+random", 3)
    for number in range(9):
        act(fleet, "add", number, 0)
    entries = {version: fleet.routing.placed_on(version) for version in fleet.versions}
    fleet.lose(0)
    fleet.tick()
    settle(fleet)
    for version, before in entries.items():
        after = fleet.routing.placed_on(version)
        assert after is not None
        assert before is not None
        assert 0 not in after.replicas
        if 0 not in before.replicas:
            assert after == before, "what it did not have stays where it is"
    act(fleet, "back", 0, 0)
    settle(fleet)
    assert {version: fleet.routing.placed_on(version) for version in fleet.versions} == entries


def test_a_plan_and_its_period_stay_when_the_log_begins_anew() -> None:
    fleet = LiveFleet("most-idle+auto+migrate", 3)
    for number in range(5):
        act(fleet, "add", number, 0)
    act(fleet, "remove", 2, 0)
    fleet.send("r", "v1", 300)
    fleet.tick(PERIOD_S)
    settle(fleet)
    fleet.tick(4.0)
    before = {version: fleet.routing.placed_on(version) for version in fleet.versions}
    next_tick_s, state = fleet.routing.next_tick_s, list(fleet.routing.state())
    fleet.begin_anew()
    assert {version: fleet.routing.placed_on(version) for version in fleet.versions} == before
    assert fleet.routing.next_tick_s == next_tick_s
    assert list(fleet.routing.state()) == state
    assert [len(versions) for versions in fleet.routing.placed()] == [
        sum(entry is not None and n in entry.replicas for entry in before.values()) for n in range(3)
    ]


def test_requests_leave_an_overloaded_replica_and_stay_where_they_went() -> None:
    fleet = LiveFleet("most-idle+everywhere+migrate", 2)
    fleet.lose(1)
    for number in range(40):
        fleet.send(f"r{number}", None, 40)
        fleet.routing.first_token(f"r{number}")
    act(fleet, "back", 1, 0)
    fleet.tick(10.0)
    moves = [move for event in fleet.logs[-1] if isinstance(event, Ticked) for move in event.moves]
    assert {(move.source, move.target) for move in moves} == {(0, 1)}
    assert all(fleet.replica_of[each] == 1 for each in fleet.replica_of if "+" in each)
    fleet.lose(0)
    act(fleet, "back", 0, 0)
    fleet.tick(10.0)
    again = [move for event in fleet.logs[-1] if isinstance(event, Ticked) for move in event.moves]
    moved_names = {move.request_id for move in moves}
    assert not moved_names & {move.request_id for move in again[len(moves) :]}


def placements(fleet: LiveFleet) -> dict[str, Entry | None]:
    return {version: fleet.routing.placed_on(version) for version in sorted(fleet.versions)}


@settings(max_examples=examples(15, 30), deadline=None)
@given(
    st.sampled_from(("auto", "most-idle+random", "auto+contiguous+migrate")),
    ACTIONS,
    st.integers(1, 9),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=12),
)
def test_a_given_placement_is_reached_from_anywhere_and_kept(
    policy: str, before: list[tuple[str, int, int]], first: int, num_more: int, loads: list[tuple[int, int]]
) -> None:
    """Loads end in any order, some fail, the log begins anew in between, and the placement is given again."""
    fleet = LiveFleet(policy, 3)
    for number in range(4):
        act(fleet, "add", number, 0)
    for action in before:
        act(fleet, *action)
    for number in range(fleet.routing.view.load.num_replicas):
        act(fleet, "back", number, 0)
    wanted = spread(sorted(fleet.versions), fleet.routing.view.load.num_replicas, first, num_more)
    fleet.routing.give(wanted)
    fleet.tick()
    for which, is_there in loads:
        act(fleet, "stage", which, is_there)
        if which % 5 == 0:
            fleet.begin_anew()
        fleet.check()
    fleet.routing.give(wanted)
    fleet.tick()
    settle(fleet)
    assert placements(fleet) == wanted
    for _ in range(3):
        fleet.send(f"r{next(fleet._numbers)}", next(iter(sorted(fleet.versions)), None), 500)
        fleet.tick(PERIOD_S)
        settle(fleet)
        assert placements(fleet) == wanted, "no period moves what was given"


def test_adapters_that_are_not_given_go_where_the_policy_puts_them() -> None:
    fleet = LiveFleet("most-idle+random", 3)
    for number in range(9):
        act(fleet, "add", number, 0)
    settle(fleet)
    by_policy = placements(fleet)
    fleet.routing.give({"v0": Entry((0, 1, 2), (0.5, 0.25, 0.25))})
    fleet.tick()
    settle(fleet)
    assert placements(fleet) == by_policy | {"v0": Entry((0, 1, 2), (0.5, 0.25, 0.25))}
    act(fleet, "add", 9, 0)
    assert fleet.routing.placed_on("v9") is not None
    fleet.lose(1)
    fleet.tick()
    entry = fleet.routing.placed_on("v0")
    assert entry is not None
    assert entry.replicas == (0, 2), "the others take the share of a lost replica"
    act(fleet, "back", 1, 0)
    settle(fleet)
    assert fleet.routing.placed_on("v0") == Entry((0, 1, 2), (0.5, 0.25, 0.25))
    fleet.routing.give({})
    fleet.tick()
    settle(fleet)
    released = fleet.routing.placed_on("v0")
    assert released is not None
    assert len(released.replicas) == 1, "the policy places it again, at once"
