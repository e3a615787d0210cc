"""Problems that no placement can solve are refused at construction; demand is extrapolated."""

from __future__ import annotations

import numpy as np
import pytest
from placement_problems import problem_of

from loraplex.core.errors import UserError
from loraplex.fleet.placements.demand import extrapolated_demand
from loraplex.fleet.plan import Plan


def test_a_fleet_without_replicas_is_refused() -> None:
    with pytest.raises(UserError, match="a fleet of 0 replicas serves no adapter"):
        problem_of(ranks=[8], demand=[1.0], num_replicas=0)


def test_more_adapters_than_the_hosts_hold_are_refused_by_how_much() -> None:
    words = r"3 adapters take 3,000 bytes, 200 more than the 2,800 bytes of host memory that 2 replicas"
    with pytest.raises(UserError, match=words):
        problem_of(ranks=[8] * 3, num_bytes=[1000] * 3, demand=[1.0] * 3, num_replicas=2, host_bytes=1400)


def test_an_adapter_larger_than_a_host_is_refused_by_how_much() -> None:
    with pytest.raises(UserError, match="adapter 1 takes 1,500 bytes, 100 more than the 1,400 bytes"):
        problem_of(ranks=[8] * 2, num_bytes=[10, 1500], demand=[1.0] * 2, num_replicas=2, host_bytes=1400)


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        ([1.0], "the demand of 1 adapters is given, but the fleet has 2"),
        ([1.0, -1.0], "adapter 1 has a demand of -1"),
        ([float("nan"), 1.0], "adapter 0 has a demand of nan"),
    ],
)
def test_demand_that_is_no_demand_is_refused(demand: list[float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        problem_of(ranks=[8, 8], demand=demand, num_replicas=2)


@pytest.mark.parametrize(
    ("replicas", "words"),
    [([[0], [1], [1]], "names adapter 2"), ([[0], [2]], "places adapter 1 on replica 2")],
)
def test_a_previous_plan_of_another_fleet_is_refused(replicas: list[list[int]], words: str) -> None:
    previous = Plan.with_equal_shares(replicas)
    with pytest.raises(UserError, match=words):
        problem_of(ranks=[8, 8], demand=[1.0, 1.0], num_replicas=2, previous=previous)


def test_demand_continues_the_trend_of_each_adapter() -> None:
    """Rising, falling below zero, steady; and one that is fitted: 0, 3, 3 has slope 1.5 around 2."""
    rates = np.array([[1.0, 9.0, 5.0, 0.0], [2.0, 5.0, 5.0, 3.0], [3.0, 1.0, 5.0, 3.0]])
    assert extrapolated_demand(rates) == pytest.approx([4.0, 0.0, 5.0, 5.0])


def test_one_period_is_continued_as_it_is() -> None:
    assert extrapolated_demand(np.array([[3.0, 0.0]])).tolist() == [3.0, 0.0]


def test_no_period_is_no_demand() -> None:
    with pytest.raises(UserError, match="at least one period"):
        extrapolated_demand(np.zeros((0, 4)))
