"""Every row of every part is computed once, and none is split finer than it pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.perf.assist_split import Share, default_num_workers, rows_worth_a_core, split_task


@given(
    num_rows=st.integers(1, 5000),
    parts=st.lists(st.integers(0, 7), max_size=8, unique=True).map(sorted),
    ready=st.lists(st.booleans(), min_size=1, max_size=20).filter(any),
    rows_each=st.integers(1, 300),
)
def test_every_row_of_every_part_is_computed_once_by_a_worker_that_is_ready(
    num_rows: int, parts: list[int], ready: list[bool], rows_each: int
) -> None:
    shares = split_task(num_rows, parts, ready, rows_each)
    for part in parts:
        own = [share for share in shares if share.first_part <= part < share.end_part]
        rows = [row for share in own for row in range(share.start, share.end)]
        assert sorted(rows) == list(range(num_rows))
        assert len(own) <= max(-(-num_rows // rows_each), 1)
    assert all(share == Share() for share, is_ready in zip(shares, ready, strict=True) if not is_ready)


def test_a_large_task_goes_to_all_workers() -> None:
    shares = split_task(128, [0, 1, 2], [True] * 12, 32)
    assert shares == [
        Share(start, start + 32, part, part + 1) for part in range(3) for start in range(0, 128, 32)
    ]


def test_parts_are_split_before_rows() -> None:
    assert split_task(20, [0, 2], [False, True, True], 8) == [Share(), Share(0, 20, 0, 1), Share(0, 20, 2, 3)]


def test_one_worker_does_it_all() -> None:
    assert split_task(20, [0, 2], [False, True], 8) == [Share(), Share(0, 20, 0, 3)]


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
