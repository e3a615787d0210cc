"""Full collections of garbage wait until few requests are in flight."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from loraplex.server.garbage import collect_if_due, keep_all_made_until_now


@pytest.fixture
def full_collections() -> Iterator[list[int]]:
    """Record the full collections since the server was ready, one entry for each."""
    thresholds, seen = gc.get_threshold(), []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(1)

    keep_all_made_until_now()
    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
        # Nothing is thawed: that would thaw all that was collected, too (conftest.py).


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_a_burst_makes_no_full_collection(full_collections: list[int]) -> None:
    held: list[Any] = [[number] for number in range(400_000)]  # as much as 2,000 waiting requests
    assert full_collections == []
    assert not collect_if_due(2_000)
    assert full_collections == []
    assert len(held) == 400_000


def test_old_garbage_is_collected_when_few_requests_are_in_flight(full_collections: list[int]) -> None:
    node = Node()
    kept = weakref.ref(node)
    held: list[Any] = [[number] for number in range(200_000)]
    del node  # too old by now for the collections that still run
    gc.collect(1)
    assert kept() is not None
    assert collect_if_due(3)
    assert kept() is None
    assert full_collections == [1]
    assert not collect_if_due(3), "again only after as much has been made"
    assert len(held) == 200_000


def test_garbage_is_collected_in_the_end_however_many_requests_are_in_flight(
    full_collections: list[int],
) -> None:
    for _ in range(10 + 2_000 // 8):
        gc.collect(1)
    assert collect_if_due(2_000)
    assert full_collections == [1]
