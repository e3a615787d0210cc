"""The directory of adapters in host memory: nothing is lost, and nothing is fetched twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.errors import UserError
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.plan import Plan
from loraplex.fleet.pool import AdapterPool, Drop, Fetch

SIZES = (10, 20, 30, 40)


def pool_of(
    sizes: Sequence[int], num_replicas: int, plan: Plan | None = None, host_bytes: int | None = None
) -> AdapterPool:
    adapters = AdapterSizes.of(ranks=[8] * len(sizes), num_bytes=sizes)
    return AdapterPool(adapters, num_replicas, plan, host_bytes)


def plan(*replicas: tuple[int, ...]) -> Plan:
    return Plan.with_equal_shares(replicas)


def soonest(replica: int) -> float:
    return 0.0


def nobody(replica: int, adapter: int) -> bool:
    return False


def test_without_a_plan_each_adapter_has_one_home() -> None:
    pool = pool_of(SIZES, 3)
    assert [pool.holders(adapter) for adapter in range(4)] == [{0}, {1}, {2}, {0}]
    assert pool.num_bytes_held == [50, 20, 30]


def test_first_homes_keep_the_memory_of_every_host() -> None:
    assert max(pool_of((60, 30, 60, 30), 2, host_bytes=90).num_bytes_held) == 90
    with pytest.raises(UserError, match="adapter 2 takes 60 bytes, 25 more than any replica has left"):
        pool_of((60, 60, 60, 10), 2, host_bytes=95)
    with pytest.raises(UserError, match="4 adapters take 190 bytes, 10 more than the 180 bytes"):
        pool_of((60, 60, 60, 10), 2, host_bytes=90)


def test_an_adapter_that_moves_is_let_go_after_the_copy() -> None:
    pool = pool_of(SIZES, 2, plan((0,), (0,), (1,), (1,)))
    assert pool.placed(plan((1,), (0,), (1,), (1,))) == []
    assert pool.holders(0) == {0}, "the only copy stays"
    assert pool.fetch(1, 0, soonest, nobody) == Fetch(source=0, drops=[])
    assert pool.is_fetching(1, 0)
    assert pool.holders(0) == {0}, "half a copy is none"
    assert pool.fetched(1, 0) == [Drop(replica=0, adapter=0)]
    assert pool.holders(0) == {1}
    assert pool.num_bytes_held == [20, 80]


def test_a_source_is_not_let_go_while_it_is_copied_from() -> None:
    pool = pool_of(SIZES, 3, plan((0,), (0,), (0,), (0,)))
    pool.placed(plan((1, 2), (0,), (0,), (0,)))
    pool.fetch(1, 0, soonest, nobody)
    pool.fetch(2, 0, soonest, nobody)
    assert pool.fetched(1, 0) == [], "replica 2 still copies from replica 0"
    assert pool.fetched(2, 0) == [Drop(replica=0, adapter=0)]


def test_the_holder_that_can_send_soonest_is_asked() -> None:
    pool = pool_of(SIZES, 4, plan((0, 1, 2), (0,), (0,), (0,)))
    assert pool.fetch(3, 0, [5.0, 3.0, 4.0, 0.0].__getitem__, nobody).source == 1


def test_a_copy_that_is_there_or_on_its_way_is_not_fetched() -> None:
    pool = pool_of(SIZES, 2)
    with pytest.raises(AssertionError):
        pool.fetch(0, 0, soonest, nobody)
    pool.fetch(1, 0, soonest, nobody)
    with pytest.raises(AssertionError):
        pool.fetch(1, 0, soonest, nobody)


def bring(pool: AdapterPool, replica: int, adapter: int, *in_use: int) -> list[Drop]:
    """Fetch an adapter to the end, while requests for others are on the replica."""
    fetch = pool.fetch(replica, adapter, soonest, lambda at, other: other in in_use)
    return [*fetch.drops, *pool.fetched(replica, adapter)]


def test_a_full_host_lets_go_of_the_copy_used_longest_ago() -> None:
    """Adapters have their homes on other replicas, and 60 bytes on replica 1 hold three of them."""
    equal = [20] * 5
    pool = pool_of(equal, 2, host_bytes=60)
    assert pool.num_bytes_held == [60, 40], "a home that is full is passed over"
    pool = pool_of(equal, 3, plan((0,), (0,), (0,), (2,), (2,)), host_bytes=60)
    pool.placed(None)
    assert [bring(pool, 1, adapter) for adapter in range(3)] == [[], [], []]
    pool.used(1, 0)
    assert bring(pool, 1, 3) == [Drop(1, 1)]
    assert bring(pool, 1, 4, 2) == [Drop(1, 0)], "somebody uses 2"
    assert bring(pool, 1, 0, 2, 3, 4) == [], "all are in use, and requests wait for this one"
    assert pool.num_bytes_held == [60, 80, 40]
    assert bring(pool, 1, 1) == [Drop(1, 2), Drop(1, 3)], "there is room again for what comes"
    pool.check_integrity()


def test_the_last_copy_and_those_of_the_plan_stay_however_full_a_host_is() -> None:
    pool = pool_of([20] * 4, 2, plan((0, 1), (0,), (1,), (1,)), host_bytes=60)
    assert bring(pool, 0, 2) == [Drop(0, 2)], "it is not named: its requests have it on the device"
    pool.placed(None)
    assert bring(pool, 0, 2) == []
    assert bring(pool, 0, 3) == [Drop(0, 0)], "1 is the last copy"
    assert pool.holders(1) == {0}


def test_a_copy_stays_where_the_other_host_has_no_room_for_a_last_copy() -> None:
    """Replica 1 holds three last copies, and one of an adapter that has another: it is to let that go."""
    homes = plan((0,), (1,), (1,), (1,), (2,), (2,), (2,))
    pool = pool_of([20] * 7, 3, homes, host_bytes=60)
    pool.placed(None)
    assert [bring(pool, *fetch) for fetch in ((1, 0), (0, 4), (0, 5))] == [[], [], []]
    assert pool.num_bytes_held == [60, 80, 60]
    assert bring(pool, 0, 6) == [Drop(0, 4)], "though 0 was used longest ago"
    assert bring(pool, 1, 4) == [Drop(1, 0)]


def test_the_most_that_a_host_held_counts_what_was_fetched_and_let_go() -> None:
    pool = pool_of([20] * 3, 3, plan((0,), (1,), (1,)))
    assert pool.most_bytes_held == 40
    pool.fetch(1, 0, soonest, nobody)
    assert pool.most_bytes_held == 60, "a copy that is under way has its memory"
    assert pool.fetched(1, 0) == [Drop(1, 0)]
    assert pool.num_bytes_held == [20, 40, 0]
    assert pool.most_bytes_held == 60


def test_a_copy_that_is_copied_from_stays() -> None:
    pool = pool_of([20] * 3, 3, plan((0, 1), (1,), (1,)), host_bytes=20)
    pool.placed(None)
    assert pool.fetch(2, 0, [0.0, 1.0, 2.0].__getitem__, nobody).source == 0
    assert pool.fetch(0, 1, soonest, nobody).drops == []
    pool.fetched(2, 0)
    assert pool.fetch(0, 2, soonest, nobody).drops == [Drop(0, 0)]


REPLICAS = st.sets(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
PLANS = st.lists(REPLICAS, min_size=4, max_size=4).map(Plan.with_equal_shares)
STEPS = st.lists(
    st.tuples(st.just("place"), PLANS | st.none())
    | st.tuples(st.sampled_from(["fetch", "use"]), st.tuples(st.integers(0, 3), st.integers(0, 3)))
    | st.tuples(st.just("end"), st.integers(0, 100)),
    max_size=30,
)


@settings(max_examples=examples(40, 100), deadline=None)
@given(
    first=PLANS | st.none(),
    host_bytes=st.none() | st.integers(40, 80),
    used=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))),
    steps=STEPS,
)
def test_every_adapter_has_a_complete_copy_at_every_moment(
    first: Plan | None,
    host_bytes: int | None,
    used: set[tuple[int, int]],
    steps: list[tuple],  # type: ignore[type-arg]
) -> None:
    """`used`: the replicas and adapters that have requests all the time."""
    pool = pool_of(SIZES, 4, first, host_bytes)
    under_way: list[tuple[int, int]] = []
    for kind, what in steps:
        if kind == "place":
            pool.placed(what)
        elif kind == "use":
            pool.used(*what)
        elif kind == "fetch":
            replica, adapter = what
            if not pool.has(replica, adapter) and not pool.is_fetching(replica, adapter):
                source, drops = pool.fetch(replica, adapter, soonest, lambda *both: both in used)
                assert pool.has(source, adapter)
                under_way.append((replica, adapter))
                assert all(at == replica and (at, other) not in used for at, other in drops)
                assert host_bytes is not None or not drops
                if drops and host_bytes is not None:  # no more than needed
                    coming = sum(SIZES[other] for at, other in under_way if at == replica)
                    last = SIZES[drops[-1].adapter]
                    assert pool.num_bytes_held[replica] + coming + last > host_bytes
        elif under_way:
            replica, adapter = under_way.pop(what % len(under_way))
            pool.fetched(replica, adapter)
        pool.check_integrity()


SIX = (10, 20, 30, 10, 20, 30)
PAIRS = st.tuples(st.integers(0, 2), st.integers(0, 5))


@settings(max_examples=examples(40, 100), deadline=None)
@given(
    host_bytes=st.integers(60, 90),
    steps=st.lists(st.tuples(st.sampled_from(["fetch", "use", "end"]), PAIRS, st.booleans()), max_size=60),
)
def test_a_host_holds_too_much_only_while_copies_are_in_use(
    host_bytes: int, steps: list[tuple[str, tuple[int, int], bool]]
) -> None:
    pool = pool_of(SIX, 3, host_bytes=host_bytes)
    under_way: list[tuple[int, int]] = []
    for kind, (replica, adapter), all_in_use in steps:
        if kind == "use":
            pool.used(replica, adapter)
        elif kind == "end" and under_way:
            pool.fetched(*under_way.pop(adapter % len(under_way)))
        elif kind == "fetch" and not pool.has(replica, adapter) and not pool.is_fetching(replica, adapter):
            pool.fetch(replica, adapter, soonest, lambda *both: all_in_use)  # noqa: B023
            under_way.append((replica, adapter))
        pool.check_integrity()
        for host in range(3):
            last = [size for each, size in enumerate(SIX) if pool.holders(each) == {host}]
            assert sum(last) <= host_bytes
