"""The directory of adapters in host memory: nothing is lost, and nothing is fetched twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.fleet.plan import Plan
from loraplex.fleet.pool import AdapterPool, Drop

SIZES = np.array([10, 20, 30, 40], np.int64)


def plan(*replicas: tuple[int, ...]) -> Plan:
    return Plan.with_equal_shares(replicas)


def soonest(replica: int) -> float:
    return 0.0


def test_without_a_plan_each_adapter_has_one_home() -> None:
    pool = AdapterPool(SIZES, 3)
    assert [pool.holders(adapter) for adapter in range(4)] == [{0}, {1}, {2}, {0}]
    assert pool.num_bytes_held == [50, 20, 30]


def test_an_adapter_that_moves_is_let_go_after_the_copy() -> None:
    pool = AdapterPool(SIZES, 2, plan((0,), (0,), (1,), (1,)))
    assert pool.placed(plan((1,), (0,), (1,), (1,))) == []
    assert pool.holders(0) == {0}, "the only copy stays"
    assert pool.fetch(1, 0, soonest) == 0
    assert pool.is_fetching(1, 0)
    assert pool.holders(0) == {0}, "half a copy is none"
    assert pool.fetched(1, 0) == [Drop(replica=0, adapter=0)]
    assert pool.holders(0) == {1}
    assert pool.num_bytes_held == [20, 80]


def test_a_source_is_not_let_go_while_it_is_copied_from() -> None:
    pool = AdapterPool(SIZES, 3, plan((0,), (0,), (0,), (0,)))
    pool.placed(plan((1, 2), (0,), (0,), (0,)))
    pool.fetch(1, 0, soonest)
    pool.fetch(2, 0, soonest)
    assert pool.fetched(1, 0) == [], "replica 2 still copies from replica 0"
    assert pool.fetched(2, 0) == [Drop(replica=0, adapter=0)]


def test_the_holder_that_can_send_soonest_is_asked() -> None:
    pool = AdapterPool(SIZES, 4, plan((0, 1, 2), (0,), (0,), (0,)))
    assert pool.fetch(3, 0, [5.0, 3.0, 4.0, 0.0].__getitem__) == 1


def test_a_copy_that_is_there_or_on_its_way_is_not_fetched() -> None:
    pool = AdapterPool(SIZES, 2)
    with pytest.raises(AssertionError):
        pool.fetch(0, 0, soonest)
    pool.fetch(1, 0, soonest)
    with pytest.raises(AssertionError):
        pool.fetch(1, 0, soonest)


REPLICAS = st.sets(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
PLANS = st.lists(REPLICAS, min_size=4, max_size=4).map(Plan.with_equal_shares)
STEPS = st.lists(
    st.tuples(st.just("place"), PLANS)
    | st.tuples(st.just("fetch"), st.tuples(st.integers(0, 3), st.integers(0, 3)))
    | st.tuples(st.just("end"), st.integers(0, 100)),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(first=PLANS | st.none(), steps=STEPS)
def test_every_adapter_has_a_complete_copy_at_every_moment(first: Plan | None, steps: list[tuple]) -> None:  # type: ignore[type-arg]
    pool = AdapterPool(SIZES, 4, first)
    under_way: list[tuple[int, int]] = []
    for kind, what in steps:
        if kind == "place":
            pool.placed(what)
        elif kind == "fetch":
            replica, adapter = what
            if not pool.has(replica, adapter) and not pool.is_fetching(replica, adapter):
                assert pool.has(pool.fetch(replica, adapter, soonest), adapter)
                under_way.append((replica, adapter))
        elif under_way:
            replica, adapter = under_way.pop(what % len(under_way))
            pool.fetched(replica, adapter)
        pool.check_integrity()
