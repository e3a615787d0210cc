from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from migration_problems import costs, replicas, request

from loraplex.fleet.migration.columns import columns_of
from loraplex.fleet.migration.migrate import Migrator, moves_for, problem_of
from loraplex.fleet.migration.problem import MigrationAdapter, MigrationReplica, MigrationRequest, Move
from loraplex.fleet.migration.trigger import UnevenReplicas


class HandMadeFleet:
    """A fleet that records which replicas it was asked about."""

    def __init__(self, requests: list[MigrationRequest], held: tuple[MigrationReplica, ...]) -> None:
        self.costs = costs()
        self.accepts = None
        self.asked: set[int] = set()
        self._held = held
        self._requests = requests

    @property
    def num_requests(self) -> list[float]:
        counts = Counter(each.replica for each in self._requests)
        return [counts[each.replica] for each in self._held]

    @property
    def kv_share(self) -> list[float]:
        tokens: Counter[int] = Counter()
        for each in self._requests:
            tokens[each.replica] += each.kv_tokens
        return [min(tokens[each.replica] / each.kv_capacity_tokens, 1.0) for each in self._held]

    def replica(self, replica: int) -> MigrationReplica:
        return self._held[replica]

    def requests_on(self, replica: int) -> list[MigrationRequest]:
        self.asked.add(replica)
        return [each for each in self._requests if each.replica == replica]

    def adapter(self, adapter: int) -> MigrationAdapter:
        return MigrationAdapter(adapter=adapter, load_s=0.05)


def overloaded_fleet() -> HandMadeFleet:
    """Forty requests of two adapters on replica 0 of four, one request on each of the others."""
    requests = [request(each, 0, adapter=each % 2) for each in range(40)]
    requests += [request(100 + each, each) for each in (1, 2, 3)]
    return HandMadeFleet(requests, replicas(4))


def test_requests_leave_the_busiest_replica_for_the_first_of_the_least_busy() -> None:
    fleet = overloaded_fleet()
    moves = Migrator().decide(0.0, fleet)
    assert 15 <= len(moves) <= 20
    assert {(move.source, move.target) for move in moves} == {(0, 1)}
    assert fleet.asked == {0, 1}, "requests of replicas that do not enter are nobody's business"


def test_more_pairs_spread_the_requests_further() -> None:
    moves = Migrator(num_pairs=3).decide(0.0, overloaded_fleet())
    assert {move.target for move in moves} == {1, 2, 3}
    assert len(moves) >= 28


def test_nothing_moves_while_the_load_is_even() -> None:
    requests = [request(each, each % 4, adapter=each % 3) for each in range(80)]
    fleet = HandMadeFleet(requests, replicas(4))
    assert Migrator().decide(0.0, fleet) == []
    assert not fleet.asked


def test_a_period_passes_between_two_looks() -> None:
    migrator, fleet = Migrator(period_s=5.0), overloaded_fleet()
    assert migrator.decide(3.0, fleet)
    assert migrator.due_s == 8.0
    assert migrator.decide(7.9, fleet) == []
    assert migrator.decide(8.0, fleet)


def test_a_move_names_the_fleets_own_numbers() -> None:
    requests = [request(f"long-{each}", 2, seconds=5.0) for each in range(2)]
    fleet = HandMadeFleet(requests, replicas(5))
    problem = problem_of(UnevenReplicas(overloaded=(2,), underloaded=(4,)), fleet)
    [move] = moves_for(problem)
    assert move in {Move("long-0", 2, 4), Move("long-1", 2, 4)}


@st.composite
def fleets(draw: st.DrawFn) -> HandMadeFleet:
    num_replicas = draw(st.integers(2, 6))
    rng = draw(st.randoms(use_true_random=False))
    busy = rng.randrange(num_replicas)
    requests = [
        request(
            each,
            busy if rng.random() < 0.6 else rng.randrange(num_replicas),
            adapter=rng.choice([None, 0, 1, 2, 3]),
            tokens=rng.randrange(1000),
            seconds=rng.random(),
        )
        for each in range(draw(st.integers(0, 80)))
    ]
    held = tuple(
        replace(each, kv_capacity_tokens=15_000, adapters=frozenset(rng.sample(range(4), 2)))
        for each in replicas(num_replicas)
    )
    return HandMadeFleet(requests, held)


@settings(max_examples=15)
@given(fleets(), st.integers(1, 3))
def test_moves_join_replicas_that_entered_and_shorten_the_makespan(
    fleet: HandMadeFleet, num_pairs: int
) -> None:
    moves = Migrator(num_pairs=num_pairs).decide(0.0, fleet)
    assert Migrator(num_pairs=num_pairs).decide(0.0, fleet) == moves
    if not moves:
        return
    givers, takers = {move.source for move in moves}, {move.target for move in moves}
    assert givers | takers <= fleet.asked
    assert not givers & takers
    assert len({move.request_id for move in moves}) == len(moves)
    entered = UnevenReplicas(overloaded=tuple(givers), underloaded=tuple(takers))
    problem = problem_of(entered, fleet)
    columns = columns_of(problem)
    target = {move.request_id: move.target for move in moves}
    place = {each.replica: index for index, each in enumerate(problem.replicas)}
    place_N = columns.source_N.copy()
    place_N[:] = [place[target.get(each.request_id, each.replica)] for each in problem.requests]
    assert columns.run_time(place_N).makespan_s <= columns.run_time(columns.source_N).makespan_s


def test_the_solver_is_imported_when_it_is_needed() -> None:
    code = "import sys, loraplex.fleet.migration.migrate; print('highspy' in sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert listed.strip() == "False"


def test_a_request_that_was_moved_stays_for_a_while() -> None:
    fleet, migrator = overloaded_fleet(), Migrator(period_s=10.0, stay_s=30.0)
    first = {move.request_id for move in migrator.decide(0.0, fleet)}
    assert first
    for now_s in (10.0, 20.0):
        again = {move.request_id for move in migrator.decide(now_s, fleet)}
        assert again, "others may go"
        assert not first & again
        first |= again
    assert {move.request_id for move in migrator.decide(60.0, fleet)} & first
    restored = Migrator(stay_s=30.0)
    restored.restore(migrator.due_s, migrator.moved_s)
    assert restored.due_s == migrator.due_s
    assert not {move.request_id for move in restored.decide(70.0, fleet)} & set(migrator.moved_s)
