"""Parts of a queue have the features of their adapters."""

from __future__ import annotations

import pytest

from loraplex.planner.demand import AdapterDemand
from loraplex.planner.features import slot_features
from loraplex.planner.queued import Queued, columns_of

ADAPTERS = [
    AdapterDemand(name=f"a-{number}", rank=8 * (1 + number % 3), rate_rps=0.1 * number)
    for number in range(20)
]


@pytest.mark.parametrize("place", [slice(0, 8), slice(8, 20), slice(19, 20), slice(0, 20)])
def test_a_part_of_a_queue_is_described_as_its_adapters_are(place: slice) -> None:
    part = Queued(ADAPTERS)[place]
    assert list(part) == ADAPTERS[place]
    assert len(part) == len(ADAPTERS[place])
    assert part[0] is ADAPTERS[place][0]
    assert slot_features(part, 4).tolist() == slot_features(ADAPTERS[place], 4).tolist()


def test_parts_share_the_columns() -> None:
    queue = Queued(ADAPTERS)
    assert queue[3:7].columns.rates_rps.obj is queue.columns.rates_rps.obj
    assert columns_of(queue) is queue.columns


def test_a_sum_is_described_as_its_adapters_are() -> None:
    queue = Queued(ADAPTERS)
    joined = queue[12:15] + queue[3:7]
    assert list(joined) == ADAPTERS[12:15] + ADAPTERS[3:7]
    assert slot_features(joined, 4).tolist() == slot_features(list(joined), 4).tolist()
    assert joined.max_rank == 24
    assert Queued([]).max_rank == 0
