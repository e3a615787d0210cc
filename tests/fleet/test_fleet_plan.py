"""Plans: what is refused, and what they report."""

from __future__ import annotations

import numpy as np
import pytest

from loraplex.core.errors import UserError
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.plan import Plan

PLAN = Plan(replicas=((0,), (0, 2), (1,)), shares=((1.0,), (0.25, 0.75), (1.0,)))


def test_a_plan_is_read_by_replica() -> None:
    assert PLAN.num_copies == 4
    table = AdapterSizes.of(ranks=[8, 8, 8], num_bytes=[10, 20, 40])
    assert PLAN.bytes_by_replica(table, 4).tolist() == [30, 40, 20, 0]
    copies = PLAN.copies()
    assert copies.adapters.tolist() == [0, 1, 1, 2]
    assert copies.replicas.tolist() == [0, 0, 2, 1]
    assert copies.shares.tolist() == [1.0, 0.25, 0.75, 1.0]


def test_shares_follow_weights() -> None:
    plan = Plan.of_weights([{2: 3.0, 0: 1.0}, {1: 0.0}])
    assert plan == Plan(replicas=((0, 2), (1,)), shares=((0.25, 0.75), (1.0,)))
    assert Plan.of_homes(np.array([1, 0])) == Plan(replicas=((1,), (0,)), shares=((1.0,), (1.0,)))


@pytest.mark.parametrize("weight", [0.0, float("inf"), float("nan")])
def test_weights_that_shares_cannot_follow_are_refused(weight: float) -> None:
    with pytest.raises(UserError, match="the weights of replicas 0, 1 sum to"):
        Plan.of_weights([{0: weight, 1: 0.0}])


def test_a_plan_that_suits_the_fleet_passes() -> None:
    PLAN.check(num_adapters=3, num_replicas=3)
    PLAN.check_known(num_adapters=5, num_replicas=3)


@pytest.mark.parametrize(
    ("replicas", "shares", "words"),
    [
        (((0,), (3,)), ((1.0,), (1.0,)), "places adapter 1 on replica 3, but the fleet has 3 replicas"),
        (((0,), (-1,)), ((1.0,), (1.0,)), "on replica -1"),
        (((0,),) * 3, ((1.0,),) * 3, "names adapter 2, but the fleet has 2 adapters"),
        (((0,),), ((1.0,),), "adapter 1 has no replica: the plan places 1 of 2"),
        (((0,), ()), ((1.0,), ()), "adapter 1 has no replica"),
        (((0,), (1,)), ((1.0,),), "replicas for 2 adapters and shares for 1"),
        (((0,), (1, 2)), ((1.0,), (1.0,)), "adapter 1 has 2 replicas and 1 shares"),
        (((0,), (2, 1)), ((1.0,), (0.5, 0.5)), r"distinct and ascending; they are \(2, 1\)"),
        (((0,), (1, 1)), ((1.0,), (0.5, 0.5)), "distinct and ascending"),
        (((0,), (1, 2)), ((1.0,), (0.5, 0.4)), "shares of adapter 1 sum to 0.9"),
        (((0,), (1, 2)), ((1.0,), (0.0, 1.0)), "adapter 1 has a share of 0 on replica 1"),
        (((0,), (1,)), ((1.0,), (float("nan"),)), "adapter 1 has a share of nan"),
        (((0,), (1.5,)), ((1.0,), (1.0,)), "adapter 1 on replica 1.5; replicas have whole numbers"),
        (((0,), ("a",)), ((1.0,), (1.0,)), "adapter 1 on replica 'a'; replicas have whole numbers"),
        (((0,), (10**30,)), ((1.0,), (1.0,)), "a replica with a number beyond all"),
    ],
)
def test_a_wrong_plan_is_refused_in_words(
    replicas: tuple[tuple[int, ...], ...], shares: tuple[tuple[float, ...], ...], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        Plan(replicas=replicas, shares=shares).check(num_adapters=2, num_replicas=3)


@pytest.mark.parametrize(
    ("ranks", "num_bytes", "words"),
    [
        ([8, 8], [1], "2 ranks and 1 sizes"),
        ([8, 0], [1, 1], "adapter 1 has 0 as its rank"),
        ([8], [0], "adapter 0 has 0 as its size in bytes"),
    ],
)
def test_a_wrong_table_is_refused_in_words(ranks: list[int], num_bytes: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        AdapterSizes.of(ranks=ranks, num_bytes=num_bytes)
