"""The memory tier's books: budget, pins, eviction, removal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.residency import Residency
from loraplex.adapters.room import ByteBudget, Tier
from loraplex.core.errors import CapacityError


def resident(residency: Residency, version: str) -> None:
    """Load a version for a request that then ends."""
    residency.enter(version)
    assert residency.acquire(version)
    if residency.tier(version) is Tier.LOADING:
        residency.loaded(version)
    residency.leave(version, pinned=True)


def with_versions(budget: int, **sizes: int) -> Residency:
    residency = Residency(ByteBudget(budget))
    for version, num_bytes in sizes.items():
        residency.add(version, num_bytes)
    return residency


def test_an_adapter_larger_than_the_budget_is_refused_by_size() -> None:
    with pytest.raises(CapacityError, match=r"11 bytes.*10.*--host-adapter-memory"):
        Residency(ByteBudget(10)).add("a", 11)


def test_the_least_recently_used_goes_first() -> None:
    residency = with_versions(20, a=10, b=10, c=10)
    for version in ("a", "b", "a", "c"):
        resident(residency, version)
    assert residency.take_evictions() == ["b"]


def test_a_pinned_adapter_never_goes() -> None:
    residency = with_versions(10, a=10, b=10)
    residency.enter("a")
    assert residency.acquire("a")
    residency.loaded("a")
    residency.enter("b")
    assert not residency.acquire("b")
    assert residency.take_evictions() == []
    residency.leave("a", pinned=True)
    assert residency.acquire("b")
    assert residency.take_evictions() == ["a"]


def test_nothing_is_evicted_in_vain() -> None:
    residency = with_versions(20, small=5, pinned=10, large=16)
    resident(residency, "small")
    residency.enter("pinned")
    assert residency.acquire("pinned")
    residency.enter("large")
    assert not residency.acquire("large")
    assert residency.tier("small") is Tier.HOST


def test_removal_waits_for_the_load_it_overtook() -> None:
    residency = with_versions(10, a=10)
    residency.enter("a")
    assert residency.acquire("a")
    residency.leave("a", pinned=True)
    residency.remove("a")
    assert residency.take_removed() == []
    residency.loaded("a")
    assert residency.take_removed() == ["a"]
    assert residency.take_evictions() == ["a"]
    assert residency.used_bytes == 0


def test_adding_a_version_again_overtakes_its_removal() -> None:
    residency = with_versions(10, a=10)
    residency.enter("a")
    residency.remove("a")
    residency.add("a", 10)
    assert residency.take_removed() == ["a"]
    assert "a" in residency
    residency.leave("a", pinned=False)
    assert "a" in residency


def test_only_a_load_that_succeeded_counts() -> None:
    residency = with_versions(10, a=10)

    def num_loads() -> int:
        (found,) = residency.snapshot()
        return found.loads

    residency.enter("a")
    assert residency.acquire("a")
    residency.failed("a")
    residency.leave("a", pinned=True)
    assert num_loads() == 0
    residency.enter("a")
    assert residency.acquire("a")
    assert num_loads() == 0
    residency.loaded("a")
    assert num_loads() == 1


def test_removing_what_is_unknown_is_complete_at_once() -> None:
    residency = Residency(ByteBudget(10))
    residency.remove("a")
    assert residency.take_removed() == ["a"]


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "finish", "fail", "remove", "add"]), st.integers(0, 4)),
        max_size=80,
    )
)
def test_the_books_hold_after_any_moves(moves: list[tuple[str, int]]) -> None:
    sizes = [3, 5, 7, 9, 11]
    residency = Residency(ByteBudget(14))
    requests: list[tuple[str, bool]] = []
    loading: set[str] = set()
    for version, num_bytes in enumerate(sizes):
        residency.add(str(version), num_bytes)
    for move, index in moves:
        version = str(index)
        if move == "add":
            residency.add(version, sizes[index])
        elif move == "enter" and version in residency:
            residency.enter(version)
            pinned = residency.acquire(version)
            if pinned and residency.tier(version) is Tier.LOADING:
                loading.add(version)
            requests.append((version, pinned))
        elif move == "leave" and requests:
            left, pinned = requests.pop(index % len(requests))
            residency.leave(left, pinned=pinned)
        elif move == "finish" and version in loading:
            loading.remove(version)
            residency.loaded(version)
        elif move == "fail" and version in loading:
            loading.remove(version)
            residency.failed(version)
            for request in [r for r in requests if r[0] == version]:
                requests.remove(request)
                residency.leave(version, pinned=request[1])
        elif move == "remove" and version in residency:
            residency.remove(version)
        residency.take_evictions()
        residency.check_integrity(
            pins={v: requests.count((v, True)) for v, _ in requests},
            in_flight={v: sum(1 for r in requests if r[0] == v) for v, _ in requests},
        )
