"""Requests divided by the shares of a plan."""

from __future__ import annotations

from collections import Counter

import pytest
from examples import examples
from fleet_views import fleet_of, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.fleet.plan import Plan
from loraplex.fleet.routers.routing_table import Division, RoutingTableRouter

WEIGHTS = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8)


def plan_of(*weights: list[float]) -> Plan:
    """Adapters with these weights on replicas 0, 1, ...; the others of the table are on replica 0."""
    rest = [[1.0]] * (8 - len(weights))
    return Plan.of_weights([dict(enumerate(each)) for each in [*weights, *rest]])


@settings(max_examples=examples(30, 60))
@given(WEIGHTS, WEIGHTS, st.lists(st.integers(0, 1), max_size=100))
def test_stride_keeps_every_share_to_within_one_request(
    first: list[float], second: list[float], adapters: list[int]
) -> None:
    """This holds after any number of requests, whatever other requests come in between."""
    plan, router = plan_of(first, second), RoutingTableRouter()
    fleet = fleet_of(8, plan=plan)
    counts: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    for adapter in adapters:
        counts[adapter][router.choose(request_of(adapter), fleet.view)] += 1
        total = counts[adapter].total()
        for replica, share in zip(plan.replicas[adapter], plan.shares[adapter], strict=True):
            assert abs(counts[adapter][replica] - share * total) < 1


def test_a_large_share_is_not_served_in_one_run() -> None:
    """Plain stride scheduling would send the first seven requests to replica 0."""
    fleet, router = fleet_of(8, plan=plan_of([0.5, *[0.5 / 7] * 7])), RoutingTableRouter()
    chosen = [router.choose(request_of(0), fleet.view) for _ in range(14)]
    assert [each == 0 for each in chosen] == [True, False] * 7
    assert sorted(each for each in chosen if each) == list(range(1, 8))


def test_random_keeps_shares_on_the_mean() -> None:
    fleet = fleet_of(3, plan=plan_of([0.6, 0.3, 0.1]))
    router = RoutingTableRouter(Division.RANDOM, seed=1)
    chosen = Counter(router.choose(request_of(0), fleet.view) for _ in range(4000))
    # Five standard deviations of the largest.
    for replica, share in enumerate((0.6, 0.3, 0.1)):
        assert chosen[replica] == pytest.approx(share * 4000, abs=155)
    again = RoutingTableRouter(Division.RANDOM, seed=1)
    assert Counter(again.choose(request_of(0), fleet.view) for _ in range(4000)) == chosen
    other = RoutingTableRouter(Division.RANDOM, seed=2)
    assert Counter(other.choose(request_of(0), fleet.view) for _ in range(4000)) != chosen


@pytest.mark.parametrize("division", Division)
def test_where_all_replicas_of_an_adapter_are_down_the_others_share_evenly(division: Division) -> None:
    """There are as many others as replicas in the plan, but its shares are not theirs."""
    fleet = fleet_of(6, plan=plan_of([0.98, 0.01, 0.01]), down=[0, 1, 2])
    router = RoutingTableRouter(division)
    chosen = Counter(router.choose(request_of(0), fleet.view) for _ in range(300))
    assert set(chosen) == {3, 4, 5}
    assert min(chosen.values()) > 70


@pytest.mark.parametrize("division", Division)
def test_where_a_replica_is_down_the_others_keep_their_proportion(division: Division) -> None:
    fleet, router = fleet_of(6, plan=plan_of([0.5, 0.4, 0.1]), down=[0]), RoutingTableRouter(division, seed=1)
    chosen = Counter(router.choose(request_of(0), fleet.view) for _ in range(1000))
    assert set(chosen) == {1, 2}
    # Five standard deviations of chance, or less than a request.
    assert chosen[1] == pytest.approx(800, abs=64 if division is Division.RANDOM else 0.9)


@settings(max_examples=examples(30, 60))
@given(
    st.lists(st.floats(0.001, 1.0), min_size=2, max_size=6),
    st.lists(st.tuples(st.sets(st.integers(0, 5)), st.integers(1, 30)), max_size=4),
)
def test_stride_keeps_proportions_while_replicas_come_and_go(
    weights: list[float], spans: list[tuple[set[int], int]]
) -> None:
    """Within each span of requests in which the same replicas are up."""
    plan, router = plan_of(weights), RoutingTableRouter()
    fleet = fleet_of(7, plan=plan)
    router.choose(request_of(0), fleet.view)
    before = frozenset(range(len(weights)))
    for down, num_requests in spans:
        fleet.view.load.accepts[:] = [replica not in down for replica in range(7)]
        up = frozenset(range(len(weights))) - down
        if len(up) < 2 or up == before:
            continue
        before, total = up, sum(weights[replica] for replica in up)
        chosen = Counter(router.choose(request_of(0), fleet.view) for _ in range(num_requests))
        for replica in up:
            assert abs(chosen[replica] - weights[replica] / total * num_requests) < 1


@pytest.mark.parametrize("division", Division)
def test_the_base_model_and_a_fleet_without_a_plan_share_evenly(division: Division) -> None:
    for plan, adapter in ((None, 0), (plan_of([0.98, 0.02]), None)):
        fleet, router = fleet_of(2, plan=plan), RoutingTableRouter(division)
        chosen = Counter(router.choose(request_of(adapter), fleet.view) for _ in range(300))
        assert min(chosen[0], chosen[1]) > 120


def test_a_new_plan_is_kept_from_its_first_request_on() -> None:
    fleet, router = fleet_of(2, plan=plan_of([0.99, 0.01])), RoutingTableRouter()
    for _ in range(50):
        router.choose(request_of(0), fleet.view)
    fleet.view.plan = plan_of([0.5, 0.5])
    chosen = Counter(router.choose(request_of(0), fleet.view) for _ in range(10))
    assert chosen == {0: 5, 1: 5}
