"""The adapter table on a CPU: budget, pins, eviction, removal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.errors import CapacityError
from loraplex.scheduling.adapter_table import AdapterTable, State
from loraplex.scheduling.room import ByteBudget


def resident(table: AdapterTable, version: str) -> None:
    """Load a version for a request that then ends."""
    table.enter(version)
    assert table.acquire(version)
    if table.state(version) is State.READING:
        table.loaded(version)
    table.leave(version, pinned=True)


def with_versions(budget: int, **sizes: int) -> AdapterTable:
    table = AdapterTable(ByteBudget(budget))
    for version, num_bytes in sizes.items():
        table.add(version, num_bytes)
    return table


def test_an_adapter_larger_than_the_budget_is_refused_by_size() -> None:
    with pytest.raises(CapacityError, match=r"11 bytes.*10.*--host-adapter-memory"):
        AdapterTable(ByteBudget(10)).add("a", 11)


def test_the_least_recently_used_goes_first() -> None:
    table = with_versions(20, a=10, b=10, c=10)
    for version in ("a", "b", "a", "c"):
        resident(table, version)
    assert table.serving.take_evictions() == ["b"]


def test_a_pinned_adapter_never_goes() -> None:
    table = with_versions(10, a=10, b=10)
    table.enter("a")
    assert table.acquire("a")
    table.loaded("a")
    table.enter("b")
    assert not table.acquire("b")
    assert table.serving.take_evictions() == []
    table.leave("a", pinned=True)
    assert table.acquire("b")
    assert table.serving.take_evictions() == ["a"]


def test_nothing_is_evicted_in_vain() -> None:
    table = with_versions(20, small=5, pinned=10, large=16)
    resident(table, "small")
    table.enter("pinned")
    assert table.acquire("pinned")
    table.enter("large")
    assert not table.acquire("large")
    assert table.state("small") is State.HOST


def test_removal_waits_for_the_load_it_overtook() -> None:
    table = with_versions(10, a=10)
    table.enter("a")
    assert table.acquire("a")
    table.leave("a", pinned=True)
    table.remove("a")
    assert table.take_removed() == []
    table.loaded("a")
    assert table.take_removed() == ["a"]
    assert table.serving.take_evictions() == ["a"]
    assert table.serving.room.used_bytes == 0


def test_adding_a_version_again_overtakes_its_removal() -> None:
    table = with_versions(10, a=10)
    table.enter("a")
    table.remove("a")
    table.add("a", 10)
    assert table.take_removed() == ["a"]
    assert "a" in table
    table.leave("a", pinned=False)
    assert "a" in table


def test_only_a_load_that_succeeded_counts() -> None:
    table = with_versions(10, a=10)

    def num_loads() -> int:
        (found,) = table.snapshot()
        return found.loads

    table.enter("a")
    assert table.acquire("a")
    table.failed("a")
    table.leave("a", pinned=True)
    assert num_loads() == 0
    table.enter("a")
    assert table.acquire("a")
    assert num_loads() == 0
    table.loaded("a")
    assert num_loads() == 1


def test_removing_what_is_unknown_is_complete_at_once() -> None:
    table = AdapterTable(ByteBudget(10))
    table.remove("a")
    assert table.take_removed() == ["a"]


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "finish", "fail", "remove", "add"]), st.integers(0, 4)),
        max_size=80,
    )
)
def test_the_books_hold_after_any_moves(moves: list[tuple[str, int]]) -> None:
    sizes = [3, 5, 7, 9, 11]
    table = AdapterTable(ByteBudget(14))
    requests: list[tuple[str, bool]] = []
    loading: set[str] = set()
    for version, num_bytes in enumerate(sizes):
        table.add(str(version), num_bytes)
    for move, index in moves:
        version = str(index)
        if move == "add":
            table.add(version, sizes[index])
        elif move == "enter" and version in table:
            table.enter(version)
            pinned = table.acquire(version)
            if pinned and table.state(version) is State.READING:
                loading.add(version)
            requests.append((version, pinned))
        elif move == "leave" and requests:
            left, pinned = requests.pop(index % len(requests))
            table.leave(left, pinned=pinned)
        elif move == "finish" and version in loading:
            loading.remove(version)
            table.loaded(version)
        elif move == "fail" and version in loading:
            loading.remove(version)
            table.failed(version)
            for request in [r for r in requests if r[0] == version]:
                requests.remove(request)
                table.leave(version, pinned=request[1])
        elif move == "remove" and version in table:
            table.remove(version)
        table.serving.take_evictions()
        table.check_integrity(
            pins={v: requests.count((v, True)) for v, _ in requests},
            in_flight={v: sum(1 for r in requests if r[0] == v) for v, _ in requests},
        )
