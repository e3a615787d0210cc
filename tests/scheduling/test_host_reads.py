"""Adapters in the host's memory: what is read, what is held, what goes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Set

import pytest

from loraplex.core.errors import CapacityError
from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.host_reads import HostReads
from loraplex.scheduling.host_room import HostRoom
from loraplex.scheduling.plan import AdapterRead
from loraplex.scheduling.room import ByteBudget

UNIT = 4096


class Staging:
    """A host tier of so many units, below more memory for serving copies than will ever be needed."""

    def __init__(self, num_units: int) -> None:
        self.room = HostRoom(num_units * UNIT)
        self.table = AdapterTable(ByteBudget(1 << 40), host=self.room)
        self.reads = HostReads(self.table)
        self.held: dict[str, int] = {}
        self.add, self.remove, self.is_there = self.table.add, self.table.remove, self.table.can_load
        self.arrived, self.failed = self.table.read_ended, self.table.read_failed
        self.fetch, self.stage_ahead, self.fetch_ahead = (
            self.reads.fetch,
            self.reads.stage_ahead,
            self.reads.fetch_ahead,
        )

    @property
    def versions(self) -> Set[str]:
        return self.table.host.resident

    @property
    def used_bytes(self) -> int:
        return self.room.used_bytes

    @property
    def ahead(self) -> Collection[str]:
        return self.reads.ahead

    def take_reads(self) -> tuple[AdapterRead, ...]:
        return self.reads.take()

    def hold(self, version: str) -> int | None:
        """Begin to load a version, and return where it is copied from."""
        self.table.enter(version)
        assert self.table.acquire(version)
        self.held[version] = 1
        return self.table.host_place(version)

    def release(self, version: str) -> None:
        """End the load without a serving copy, so that it can be held again."""
        del self.held[version]
        self.table.failed(version)
        self.table.leave(version, pinned=True)

    def check_integrity(self) -> None:
        self.table.check_integrity(pins=self.held, in_flight=self.held)


def staging_of(num_units: int, **sizes: int) -> Staging:
    staging = Staging(num_units)
    for version, size in sizes.items():
        staging.add(version, size * UNIT)
    return staging


def read(staging: Staging, version: str) -> None:
    assert not staging.is_there(version)
    assert staging.fetch(version)
    assert [one.version for one in staging.take_reads()] == [version]
    staging.arrived(version)


def test_what_is_there_is_not_read_again() -> None:
    staging = staging_of(4, a=2, b=2)
    read(staging, "a")
    assert staging.is_there("a")
    assert staging.fetch("a")
    assert staging.take_reads() == ()
    assert staging.versions == {"a"}
    assert staging.used_bytes == 2 * UNIT


def test_the_one_that_was_held_least_makes_room() -> None:
    staging = staging_of(4, a=2, b=2, c=2)
    read(staging, "a")
    read(staging, "b")
    for _ in range(2):
        staging.hold("a")
        staging.release("a")
    read(staging, "c")
    assert staging.versions == {"a", "c"}
    staging.check_integrity()


def test_what_a_device_copies_stays() -> None:
    staging = staging_of(4, a=2, b=2, c=2)
    read(staging, "a")
    read(staging, "b")
    places = {staging.hold("a"), staging.hold("b")}
    assert len(places) == 2
    assert not staging.fetch("c")
    assert staging.take_reads() == ()
    staging.release("b")
    read(staging, "c")
    assert staging.versions == {"a", "c"}
    assert staging.table.host_place("a") in places


def test_few_are_read_at_a_time_and_the_next_is_whoever_asks_first() -> None:
    staging = staging_of(10, a=1, b=1, c=1, d=1)
    for version in "abcd":
        assert staging.fetch(version)
    assert [one.version for one in staging.take_reads()] == ["a", "b"]
    staging.arrived("b")
    for version in "dc":
        assert staging.fetch(version)
    assert [one.version for one in staging.take_reads()] == ["d"]


def test_a_read_that_failed_leaves_its_place_and_may_be_tried_again() -> None:
    staging = staging_of(2, a=2)
    assert staging.fetch("a")
    staging.take_reads()
    staging.failed("a")
    assert staging.used_bytes == 0
    read(staging, "a")


def test_what_is_too_large_is_loaded_without_staging() -> None:
    staging = staging_of(2, large=3)
    assert staging.is_there("large")
    assert staging.hold("large") is None
    staging.release("large")
    assert staging.take_reads() == ()


def test_one_that_is_removed_while_it_is_read_goes_when_it_has_come() -> None:
    staging = staging_of(4, a=2)
    staging.fetch("a")
    staging.take_reads()
    staging.remove("a")
    assert staging.table.take_removed() == ["a"]
    staging.check_integrity()
    staging.arrived("a")
    assert staging.used_bytes == 0
    staging.check_integrity()


def test_what_nobody_asked_for_takes_free_memory_only() -> None:
    staging = staging_of(4, a=2, b=2, c=2)
    for version in "abc":
        staging.stage_ahead(version)
    staging.fetch_ahead()
    assert [one.version for one in staging.take_reads()] == ["a", "b"]
    staging.arrived("a")
    staging.arrived("b")
    staging.fetch_ahead()
    assert staging.take_reads() == ()
    assert not staging.ahead
    assert staging.versions == {"a", "b"}


def test_nothing_leaves_for_one_that_finds_no_room_all_the_same() -> None:
    staging = staging_of(6, a=2, b=2, held=2, large=5)
    for version in ("a", "held", "b"):
        read(staging, version)
    staging.hold("held")
    assert not staging.fetch("large")
    assert staging.versions == {"a", "b", "held"}
    staging.release("held")
    read(staging, "large")
    assert staging.versions == {"large"}


def test_a_room_refuses_what_it_could_never_hold() -> None:
    with pytest.raises(CapacityError, match="--host-adapter-memory"):
        HostRoom(2 * UNIT).taken_by(2 * UNIT + 1)


@pytest.mark.parametrize("seed", range(20))
def test_places_never_overlap_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {f"v{index}": rng.randint(1, 6) for index in range(12)}
    staging = staging_of(16, **sizes)
    reading: dict[str, int] = {}
    held: dict[str, int] = {}
    for _ in range(400):
        version = rng.choice(list(sizes))
        action = rng.random()
        if action < 0.5 and not staging.is_there(version):
            staging.fetch(version)
            reading |= {one.version: one.place for one in staging.take_reads()}
        elif action < 0.7 and reading:
            version = rng.choice(list(reading))
            del reading[version]
            staging.arrived(version) if rng.random() < 0.8 else staging.failed(version)
        elif action < 0.85 and version in staging.versions and version not in held:
            place = staging.hold(version)
            assert place is not None
            held[version] = place
        elif held:
            version = rng.choice(list(held))
            del held[version]
            staging.release(version)
        spans = sorted((place, place + sizes[name] * UNIT) for name, place in {**reading, **held}.items())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert all(begin >= 0 and end <= 16 * UNIT for begin, end in spans)
        assert held.keys() <= staging.versions
        staging.check_integrity()
