"""Every row is computed once, by a worker that is there, and none is split finer than it pays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.assist.split import default_num_workers, rows_worth_a_core, split_rows


@given(
    num_rows=st.integers(1, 5000),
    ready=st.lists(st.booleans(), min_size=1, max_size=20).filter(any),
    rows_each=st.integers(1, 300),
)
def test_slices_cover_all_rows_evenly_and_only_where_workers_are(
    num_rows: int, ready: list[bool], rows_each: int
) -> None:
    bounds = split_rows(num_rows, ready, rows_each)
    sizes = [end - start for start, end in pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == sum(sizes) == num_rows
    assert all(size == 0 for size, is_ready in zip(sizes, ready, strict=True) if not is_ready)
    used = [size for size in sizes if size > 0]
    assert max(used) - min(used) <= 1
    assert len(used) == min(sum(ready), -(-num_rows // rows_each))


def test_a_large_task_goes_to_all_workers() -> None:
    assert split_rows(256, [True] * 8, 32) == [0, 32, 64, 96, 128, 160, 192, 224, 256]


def test_a_small_task_stays_with_one() -> None:
    assert split_rows(20, [False, True, True], 32) == [0, 0, 20, 20]


@pytest.mark.parametrize(
    ("times_us", "rows"),
    [
        ({8: 100.0, 16: 104.0, 32: 124.0, 64: 220.0}, 32),
        ({8: 100.0, 16: 190.0, 32: 380.0}, 8),
        ({8: 100.0, 16: 100.0, 32: 99.0}, 32),
    ],
)
def test_rows_are_worth_a_core_while_more_of_them_cost_nothing(times_us: dict[int, float], rows: int) -> None:
    assert rows_worth_a_core(times_us) == rows


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 0), (3, 0), (4, 2), (16, 8), (192, 16)])
def test_few_cores_get_few_workers_or_none(cores: int, workers: int) -> None:
    assert default_num_workers(cores) == workers
