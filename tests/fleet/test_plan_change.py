"""The change from one plan to the next: an adapter moves when its new replicas have it."""

from __future__ import annotations

import pytest

from loraplex.fleet.plan import Plan
from loraplex.fleet.plan_change import PlanChange, Stage

ALL = {0, 1, 2}


def change_of(*held: tuple[int, int]) -> PlanChange:
    """A change in a fleet where replicas hold these adapters."""
    return PlanChange(lambda replica, adapter: (replica, adapter) in held)


def plan_of(*replicas: tuple[int, ...]) -> Plan:
    return Plan.with_equal_shares(replicas)


def test_the_old_replicas_serve_until_the_new_ones_have_it() -> None:
    change, before, after = change_of(), plan_of((0,), (0,)), plan_of((1, 2), (0,))
    now, stages = change.begin(before, after, ALL)
    assert now is before
    assert stages == [Stage(1, 0), Stage(2, 0)]
    now = change.staged(now, Stage(2, 0), is_there=True)
    assert now is before, "one of the two has it"
    assert change.staged(now, Stage(1, 0), is_there=True) == after
    assert not change.pending


def test_what_a_replica_holds_already_is_not_waited_for() -> None:
    now, stages = change_of((1, 0)).begin(plan_of((0,)), plan_of((1,)), ALL)
    assert (now, stages) == (plan_of((1,)), [])


def test_a_replica_that_cannot_bring_it_in_leaves_its_share_to_the_others() -> None:
    change, before = change_of(), plan_of((0,))
    now, _ = change.begin(before, Plan.of_weights([{0: 0.2, 1: 0.2, 2: 0.6}]), ALL)
    now = change.staged(now, Stage(2, 0), is_there=False)
    now = change.staged(now, Stage(1, 0), is_there=True)
    assert now.replicas == ((0, 1),)
    assert now.shares[0] == pytest.approx((0.5, 0.5))


def test_an_adapter_that_nobody_brings_in_stays_and_is_asked_for_again() -> None:
    change, before, after = change_of(), plan_of((0,)), plan_of((1,))
    now, _ = change.begin(before, after, ALL)
    now = change.staged(now, Stage(1, 0), is_there=False)
    assert now is before
    assert change.begin(now, after, ALL) == (before, [Stage(1, 0)])


def test_a_replica_that_was_asked_is_not_asked_again() -> None:
    change, before = change_of(), plan_of((0,))
    now, _ = change.begin(before, plan_of((1,)), ALL)
    now, stages = change.begin(now, plan_of((1, 2)), ALL)
    assert stages == [Stage(2, 0)]
    now = change.staged(now, Stage(1, 0), is_there=True)
    assert change.staged(now, Stage(2, 0), is_there=True) == plan_of((1, 2))


def test_an_answer_that_nobody_waits_for_any_more_changes_nothing() -> None:
    change, before = change_of(), plan_of((0,), (0,))
    now, _ = change.begin(before, plan_of((1,), (2,)), ALL)
    now, stages = change.begin(now, plan_of((0,), (2,)), ALL)
    assert not stages
    assert change.staged(now, Stage(1, 0), is_there=True) is before
    change.forget(1)
    assert change.staged(now, Stage(2, 1), is_there=True) is before


def test_where_no_old_replica_serves_there_is_nothing_to_wait_for() -> None:
    now, stages = change_of().begin(plan_of((0,)), plan_of((1,)), {1, 2})
    assert (now, stages) == (plan_of((1,)), [Stage(1, 0)])
