"""The exact assignment, against all permutations."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loraplex.fleet.placements.assignment import least_cost_assignment


def test_a_matrix_by_hand() -> None:
    """The cheapest cell of the first row is left to the second, which would pay 9 for another."""
    costs = np.array([[1, 2, 9], [1, 9, 9], [9, 9, 3]])
    assert least_cost_assignment(costs).tolist() == [1, 0, 2]


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(-50, 50), min_size=n * n, max_size=n * n)))
def test_no_permutation_is_cheaper(cells: list[int]) -> None:
    size = round(len(cells) ** 0.5)
    costs = np.array(cells, dtype=np.int64).reshape(size, size)
    columns = least_cost_assignment(costs)
    assert sorted(columns.tolist()) == list(range(size))
    rows = np.arange(size)
    assert costs[rows, columns].sum() == min(
        costs[rows, each].sum() for each in map(list, permutations(rows))
    )
