from __future__ import annotations

from hypothesis import given
from packing_problems import demand_of, demands

from loraplex.planner.demand import Demand
from loraplex.planner.packing.order import size_first_zigzag
from loraplex.planner.packing.testing_points import SLOT_COUNTS, each_testing_point


def test_sizes_fall_and_rates_zigzag_within_a_size() -> None:
    demand = demand_of((8, 0.1), (32, 1), (32, 5), (8, 0.2), (32, 4), (32, 2), (32, 3), (16, 9))
    ordered = size_first_zigzag(demand.adapters)
    assert [(each.rank, each.rate_rps) for each in ordered] == [
        (32, 5),
        (32, 1),
        (32, 4),
        (32, 2),
        (32, 3),
        (16, 9),
        (8, 0.2),
        (8, 0.1),
    ]


def test_an_even_number_of_rates_zigzags_too() -> None:
    ordered = size_first_zigzag(demand_of((8, 1), (8, 2), (8, 3), (8, 4)).adapters)
    assert [each.rate_rps for each in ordered] == [4, 1, 3, 2]


@given(demands(12))
def test_the_order_does_not_depend_on_that_of_the_demand(demand: Demand) -> None:
    assert size_first_zigzag(demand.adapters) == size_first_zigzag(reversed(demand.adapters))


def test_testing_points_are_the_papers_and_go_on() -> None:
    points = each_testing_point()
    first = tuple(next(points) for _ in SLOT_COUNTS)
    assert first == (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 576)
    assert [next(points), next(points)] == [648, 729]
