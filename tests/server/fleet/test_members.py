"""Which replicas take requests, and what is said when none does."""

from __future__ import annotations

import pytest
from fake_replicas import FakeReplica

from loraplex.core.errors import EngineDeadError, InvalidRequestError
from loraplex.server.engine_status import EngineState
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
    with members.leaving([1]):  # nobody is sent anything there
        pass
    replicas[1].state = RESTARTING
    members.drain(0)  # another one is on its way


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
