"""The replicas that take requests, and the error when none does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from fake_replicas import FakeReplica

from loraplex.core.errors import EngineDeadError, InvalidRequestError
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.server.engine_status import EngineState, Fleet, serving_in_words
from loraplex.server.fleet.fleet_adapters import FleetAdapters
from loraplex.server.fleet.fleet_stats import sum_of
from loraplex.server.fleet.members import Members

READY, FAILED, RESTARTING = EngineState.READY, EngineState.FAILED, EngineState.RESTARTING


def members_of(*states: EngineState) -> tuple[Members, list[FakeReplica]]:
    replicas = [FakeReplica() for _ in states]
    for replica, state in zip(replicas, states, strict=True):
        replica.state = state
    return Members(list(replicas)), replicas


def test_the_last_one_that_serves_is_not_drained_for_one_that_was_given_up() -> None:
    members, replicas = members_of(READY, FAILED)
    with pytest.raises(InvalidRequestError, match=r"last one that takes requests.*or wait until one is back"):
        members.drain(0)
    with pytest.raises(InvalidRequestError), members.leaving([0]):
        pass
    with members.leaving([1]):  # it gets no requests
        pass
    replicas[1].state = RESTARTING
    members.drain(0)  # another one is starting


def test_replicas_that_join_know_the_rights_of_tenants() -> None:
    members, replicas = members_of(READY, READY)
    policies = [TenantPolicy(name="a", share=2.0)]
    members.set_tenants(policies)
    joined = FakeReplica()
    members.put(2, joined)
    assert [each.tenants for each in (*replicas, joined)] == [policies] * 3


def test_a_fleet_whose_only_healthy_replica_is_drained_is_not_ready_and_says_so() -> None:
    members, replicas = members_of(READY, READY)
    members.drain(0)
    assert (members.status.state, members.status.message) == (READY, "1 of 2 replicas are ready")
    replicas[1].give_up()
    assert members.status.state is FAILED
    with pytest.raises(EngineDeadError, match="replica 0 is drained: `loraplex fleet drain 0 --undo`"):
        members.accepting()
    members.undrain(0)
    assert members.accepting() == [True, False]
    assert members.status.state is READY


def test_a_replica_that_has_left_is_shown_no_more_and_one_that_is_replaced_restarts() -> None:
    members, _ = members_of(READY, EngineState.CLOSED)
    assert [each.number for each in members.statuses(lambda number: 0)] == [0]
    with members.replacing(1):
        shown = members.statuses(lambda number: 0)[1]
    assert (shown.number, shown.status.state) == (1, RESTARTING)
    assert shown.status.message == "it is being replaced by a new one"


def test_a_server_that_could_not_join_is_counted_and_told_of_adapters_later() -> None:
    members = Members([FakeReplica(), FakeReplica()], are_servers=True)
    for number, state in enumerate((READY, EngineState.CLOSED)):
        cast("FakeReplica", members[number]).state = state
    adapters = FleetAdapters(members)
    assert (members.status.message, len(adapters.states("v"))) == ("", 1)  # it has left
    members.lost[1] = "another base model"
    assert members.status.message == "1 of 2 replicas are ready"
    assert adapters.states("v")[1] == "replica 1: unreachable, reads it when it is back"


def test_a_replica_that_is_replaced_counts_as_restarted() -> None:
    members, _ = members_of(READY, EngineState.CLOSED)
    with members.replacing(1):
        members.put(1, FakeReplica())
    assert members.statuses(lambda number: 0)[1].status.num_restarts == 1
    members.put(1, FakeReplica())  # it had been scaled away
    assert members.status.num_restarts == 1


def test_a_number_that_there_is_not_is_said_with_those_that_there_are() -> None:
    members, _ = members_of(READY, EngineState.CLOSED, READY)
    with pytest.raises(InvalidRequestError, match="there is no replica 3; there are 0, 2"):
        members.drain(3)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ((READY, READY), "2"),
        ((READY, FAILED, READY), "2 of 3 serve (`loraplex fleet status` says why the others do not)"),
    ],
)
def test_the_replicas_that_serve_are_counted_for_the_banner(
    states: tuple[EngineState, ...], words: str
) -> None:
    members, _ = members_of(*states)
    fleet = SimpleNamespace(replicas=members.statuses(lambda number: 0))
    assert serving_in_words(cast("Fleet", fleet)) == words


def test_a_server_that_others_start_is_unreachable_and_not_failed() -> None:
    replica = FakeReplica()
    replica.give_up()
    members = Members([replica], are_servers=True)
    assert members.statuses(lambda number: 0)[0].status.state is EngineState.UNREACHABLE
    replica.state = EngineState.CLOSED
    with members.replacing(0):
        (shown,) = members.statuses(lambda number: 0)
        assert (shown.status.state, shown.status.message) == (
            EngineState.STARTING,
            "it answers, and is given its adapters",
        )
        members.put(0, FakeReplica())
    assert members.status.num_restarts == 0


def stats_of(steps: int, *, loads: int, tier: str = "host") -> EngineStats:
    adapter = AdapterStats(version="v", tier=tier, num_bytes=100, in_flight=0, loads=loads)
    return EngineStats(num_steps=steps, num_running=1, adapter_fetches=loads, adapters=(adapter,))


def test_counters_outlive_replicas_that_start_anew_or_leave() -> None:
    members, replicas = members_of(READY, READY)
    members.know("v")

    def total(*each: EngineStats) -> tuple[int, int, int]:
        for number, stats in enumerate(each):
            members.saw(number, stats)
        found = members.sum_of(each)
        return found.num_steps, found.adapters[0].loads, found.num_running

    assert total(stats_of(100, loads=3), stats_of(50, loads=1)) == (150, 4, 2)
    assert total(stats_of(120, loads=3), stats_of(10, loads=1)) == (180, 4, 2), "the second has started anew"
    assert total(stats_of(0, loads=0), stats_of(10, loads=1)) == (180, 4, 2), "the first is away for a while"
    assert total(stats_of(130, loads=3), stats_of(10, loads=1)) == (190, 4, 2)
    assert total(stats_of(130, loads=3)) == (190, 4, 1), "the second has left"
    assert (members.num_loads, members.num_fetches) == ({0: 3, 1: 1}, {0: 3, 1: 1})
    replicas[0].num_restarts = 2
    members.put(0, FakeReplica())
    assert members.status.num_restarts == 2
    assert members.statuses(lambda number: 0)[0].status.num_restarts == 2


def test_an_adapter_that_is_removed_is_counted_no_more_though_an_engine_still_reports_it() -> None:
    members, _ = members_of(READY)
    members.know("v")
    members.saw(0, stats_of(1, loads=5))
    members.forget("v")
    members.saw(0, stats_of(1, loads=5))
    assert members.num_loads == {0: 5}
    assert members.sum_of([stats_of(1, loads=5)]).adapters[0].loads == 0
    members.know("v")
    members.saw(0, stats_of(1, loads=1))
    assert members.num_loads == {0: 6}


@pytest.mark.parametrize(("tiers", "num_bytes"), [("hh", 200), ("hd", 100), ("dh", 100), ("dd", 100)])
def test_an_adapter_takes_the_memory_of_replicas_that_hold_it(tiers: str, num_bytes: int) -> None:
    named = {"h": "host", "d": "disk"}
    (adapter,) = sum_of([stats_of(1, loads=1, tier=named[tier]) for tier in tiers]).adapters
    assert adapter.num_bytes == num_bytes
