"""Solve the assignment problem exactly: one column for each row, at the least total cost.

The method is shortest augmenting paths with potentials (the Hungarian method in the form of Jonker and
Volgenant), O(n^3), with the innermost loop in numpy. Costs are integers, so there is no rounding.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loraplex.core.arrays import IntArray

_UNREACHED: Final = np.iinfo(np.int64).max // 2


def least_cost_assignment(costs: IntArray) -> IntArray:
    """Return the column of each row of a square matrix, at the least total cost."""
    size = len(costs)
    assert costs.shape == (size, size), "an assignment needs as many columns as rows"
    # Column `size` stands for "no column": the path of a row that has none yet begins there.
    row_of = np.full(size + 1, -1, dtype=np.int64)
    row_potential = np.zeros(size, dtype=np.int64)
    column_potential = np.zeros(size + 1, dtype=np.int64)
    for row in range(size):
        row_of[size] = row
        _augment(costs, row_of, row_potential, column_potential)
    columns = np.empty(size, dtype=np.int64)
    columns[row_of[:size]] = np.arange(size)
    return columns


def _augment(costs: IntArray, row_of: IntArray, row_potential: IntArray, column_potential: IntArray) -> None:
    """Assign the row at the last column a real one, moving other rows along the shortest alternating path."""
    size = len(costs)
    distance = np.full(size, _UNREACHED, dtype=np.int64)
    come_from = np.full(size, size, dtype=np.int64)
    visited = np.zeros(size + 1, dtype=bool)
    column = size
    while row_of[column] >= 0:
        visited[column] = True
        row = row_of[column]
        reduced = costs[row] - row_potential[row] - column_potential[:size]
        closer = (reduced < distance) & ~visited[:size]
        distance[closer] = reduced[closer]
        come_from[closer] = column
        nearest = int(np.where(visited[:size], _UNREACHED, distance).argmin())
        step = distance[nearest]
        row_potential[row_of[visited]] += step
        column_potential[visited] -= step
        distance[~visited[:size]] -= step
        column = nearest
    while column != size:
        before = int(come_from[column])
        row_of[column] = row_of[before]
        column = before
