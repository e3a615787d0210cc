"""The adapter table on a CPU: budget, pins, eviction, removal."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.errors import CapacityError
from loraplex.scheduling.adapter_table import AdapterTable, State
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.room import ByteBudget


def resident(table: AdapterTable, version: str) -> None:
    """Load a version for a request that then ends."""
    table.enter(version)
    assert table.acquire(version)
    if version in table.serving.loading:
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


# ---- on a GPU, with a host tier in between

PAGE = 4096


def staged_table() -> AdapterTable:
    """The device has room for two adapters of a page, the host for one."""
    return Arena(num_pages=3, page_bytes=PAGE, block_size=4, host_bytes=PAGE).table


def test_a_version_walks_from_disk_to_the_device_and_back() -> None:
    table, seen = staged_table(), []
    table.add("a", PAGE)
    table.add("b", PAGE)

    def note() -> None:
        seen.append(table.state("a"))

    note()
    assert not table.can_load("a")
    assert table.begin_read("a")
    note()
    table.read_failed("a")
    note()
    assert table.begin_read("a")
    table.read_ended("a")
    note()
    table.enter("a")
    assert table.acquire("a")
    note()
    assert not table.begin_read("b"), "what the device copies from was evicted"
    table.failed("a")
    table.leave("a", pinned=True)
    note()
    resident(table, "a")
    note()
    table.serving.evict(next(iter(table.serving.idle)))
    note()
    table.unstage("a")
    note()
    assert seen == ["disk", "reading", "disk", "host", "copying", "host", "device", "host", "disk"]
    table.check_integrity({}, {})


def test_a_staged_copy_comes_and_goes_beside_the_serving_one() -> None:
    table = staged_table()
    table.add("a", PAGE)
    table.add("b", PAGE)
    assert table.begin_read("a")
    table.read_ended("a")
    resident(table, "a")
    assert table.begin_read("b"), "the serving copy is complete: the staged one may go"
    assert table.host.take_evictions() == ["a"]
    assert table.state("a") is State.DEVICE
    table.serving.evict(next(iter(table.serving.idle)))
    assert table.state("a") is State.DISK


def test_what_users_see_is_loading_only_while_requests_can_wait_for_the_load_itself() -> None:
    table, shown = staged_table(), []
    table.add("a", PAGE)

    def note() -> None:
        shown.append(str(table.snapshot()[0].tier))

    note()
    assert table.begin_read("a")
    note()
    table.read_ended("a")
    note()
    assert table.load_ahead("a")
    note()
    table.loaded("a")
    note()
    assert shown == ["disk", "disk", "host", "loading", "device"]


def test_a_removed_version_leaves_the_host_when_that_is_reported_or_when_its_read_ends() -> None:
    table = staged_table()
    table.add("a", PAGE)
    assert table.begin_read("a")
    table.remove("a")
    assert "a" not in table
    assert table.take_removed() == ["a"]
    assert table.snapshot() == []
    table.check_integrity({}, {})
    assert table.host.room.used_bytes == PAGE, "a read still writes there"
    table.read_ended("a")
    assert table.host.room.used_bytes == 0
    table.add("a", PAGE)
    assert table.state("a") is State.DISK


def test_a_version_that_is_added_again_keeps_the_read_under_way() -> None:
    table = staged_table()
    table.add("a", PAGE)
    assert table.begin_read("a")
    table.remove("a")
    assert table.take_removed() == ["a"]
    table.add("a", PAGE)
    assert table.state("a") is State.READING
    table.read_ended("a")
    assert table.state("a") is State.HOST
    table.check_integrity({}, {})


def test_a_removal_that_is_reported_late_touches_nothing_of_a_version_in_use_again() -> None:
    table = staged_table()
    table.add("a", PAGE)
    assert table.begin_read("a")
    table.read_ended("a")
    table.remove("a")
    table.add("a", PAGE)
    table.enter("a")
    table.remove("a")
    assert table.take_removed() == ["a"], "the first of the two removals"
    assert table.state("a") is State.HOST
    assert table.acquire("a")
    table.loaded("a")
    table.leave("a", pinned=True)
    assert table.take_removed() == ["a"]
    assert table.host.room.used_bytes == table.serving.room.used_bytes == 0


DRAWN = {
    ("disk", "reading"),
    ("reading", "disk"),
    ("reading", "host"),
    ("host", "disk"),
    ("host", "copying"),
    ("copying", "host"),
    ("copying", "device"),
    ("device", "host"),
    # Without a complete copy on the host: a version that is not staged, or whose staged copy was evicted.
    ("disk", "copying"),
    ("copying", "disk"),
    ("device", "disk"),
    ("device", "reading"),
}
"""The transitions at the top of adapter_table.py."""


class Walk:
    """Random events of a table, each of which moves versions by drawn transitions only."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.memory = Arena(num_pages=6, page_bytes=PAGE, block_size=4, host_bytes=3 * PAGE)
        self.table = self.memory.table
        self.sizes = {"a": 1, "b": 1, "c": 2, "d": 3, "unstaged": 4}
        self.held: Counter[str] = Counter()
        self.seen: set[tuple[str, str]] = set()
        for version, size in self.sizes.items():
            self.table.add(version, size * PAGE)

    def act(self) -> None:
        before = {version: self.table.state(version) for version in self.sizes}
        version = self.rng.choice(list(self.sizes))
        acts = [self.read, self.end_read, self.ask, self.end_load, self.leave, self.unstage, self.evict]
        self.rng.choice(acts)(version)
        moved = {
            (str(state), str(self.table.state(version)))
            for version, state in before.items()
            if self.table.state(version) is not state
        }
        assert moved <= DRAWN
        self.seen |= moved
        self.table.check_integrity(self.held, self.held)
        self.memory.check_integrity()

    def read(self, version: str) -> None:
        if self.table.can_read(version):
            self.table.begin_read(version, ahead=self.rng.random() < 0.3)

    def end_read(self, version: str) -> None:
        if version in self.table.host.loading:
            (self.table.read_failed if self.rng.random() < 0.3 else self.table.read_ended)(version)

    def ask(self, version: str) -> None:
        if not self.table.is_absent(version) or self.table.can_load(version):
            self.table.enter(version)
            if self.table.acquire(version):
                self.held[version] += 1
            else:
                self.table.leave(version, pinned=False)
            self.memory.take_block_moves()

    def end_load(self, version: str) -> None:
        if version in self.table.serving.loading:
            if self.rng.random() < 0.7:
                self.table.loaded(version)
                return
            self.table.failed(version)
            while self.held[version]:
                self.leave(version)

    def leave(self, version: str) -> None:
        if self.held[version]:
            self.held[version] -= 1
            self.table.leave(version, pinned=True)

    def unstage(self, version: str) -> None:
        self.table.unstage(version)

    def evict(self, version: str) -> None:
        idle = self.table.serving.idle
        if version in idle:
            self.table.serving.evict(next(one for one in idle if one.version == version))


def test_versions_move_as_drawn() -> None:
    seen = set()
    for seed in range(10):
        walk = Walk(seed)
        for _ in range(400):
            walk.act()
        seen |= walk.seen
    assert seen == DRAWN, "a transition is drawn that is never taken"
