"""Workers compute what torch computes, whatever the sizes, one task after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from assist_pools import (
    IN,
    OUT,
    ROWS,
    WAIT_S,
    Loras,
    assert_equal,
    check,
    done_word,
    eventually,
    process_state,
    running_pool,
    submit_random,
)

from loraplex.core.errors import CapacityError, EngineDeadError
from loraplex.engine.assist.crew import Patience
from loraplex.engine.assist.pool import AssistPool
from loraplex.engine.assist.product import PROFILED_ROWS
from loraplex.perf.assist_split import split_task

GIVEN_ROWS = 16
"""Rows that are worth a core of the shared pool: fewer than where they are neither given nor measured."""


@pytest.fixture(scope="module")
def pool() -> Iterator[AssistPool]:
    with running_pool(2, rows_each=GIVEN_ROWS) as pool:
        yield pool


@pytest.fixture(scope="module")
def loras(pool: AssistPool) -> Loras:
    return Loras(pool, torch.float32)


@pytest.mark.parametrize("num_rows", [1, 2, 31, 32, 33, 64, 65, 100, 257, ROWS])
def test_every_number_of_rows(pool: AssistPool, loras: Loras, num_rows: int) -> None:
    check(pool, loras, num_rows)


def test_large_tasks_are_shared_out(pool: AssistPool, loras: Loras) -> None:
    ticket, expected = submit_random(pool, loras, ROWS)
    assert pool.num_workers == 2
    assert not pool.wait(ticket, 0.01)  # nobody starts by himself
    assert pool.y.isnan().all()
    pool.start(ticket)
    assert pool.wait(ticket, WAIT_S)
    assert_equal(pool, expected)
    assert [done_word(pool, slot) for slot in (0, 1)] == [ticket, ticket]


def test_several_parts_of_any_rank(pool: AssistPool) -> None:
    check(pool, Loras(pool, torch.float32, ranks=(1, 7, 33, 64)), 150)


def test_results_do_not_depend_on_who_computes_which_rows(pool: AssistPool, loras: Loras) -> None:
    pool.x.normal_()
    last = pool.submit(loras.task(ROWS))
    pool.start(last)
    assert pool.wait(last, WAIT_S)
    together = pool.y[: ROWS * OUT].view(ROWS, OUT).clone()
    for first, num_rows in ((0, 40), (40, 200), (240, 60)):
        last = pool.submit(loras.task(num_rows, x_start=first * IN, y_start=first * OUT))
    pool.start(last)
    assert pool.wait(last, WAIT_S)
    torch.testing.assert_close(pool.y[: ROWS * OUT].view(ROWS, OUT), together, rtol=1e-5, atol=1e-5)


def test_other_rows_and_columns_stay_as_they_are(pool: AssistPool) -> None:
    loras = Loras(pool, torch.float32, ranks=(5, 9))
    pool.x.normal_()
    pool.y.fill_(2.0)
    only_second = replace(loras.task(40, x_start=10 * IN, y_start=20 * 2 * OUT), parts=loras.parts[1:])
    ticket = pool.submit(only_second)
    pool.start(ticket)
    assert pool.wait(ticket, WAIT_S)
    y = pool.y[: ROWS * 2 * OUT].view(ROWS, 2 * OUT)
    expected = loras.expected(pool.x.view(ROWS, IN)[10:50])[:, OUT:].float()
    torch.testing.assert_close(y[20:60, OUT:], expected, rtol=1e-5, atol=1e-5)
    assert (y[:, :OUT] == 2.0).all()
    assert (y[:20] == 2.0).all()
    assert (y[60:] == 2.0).all()


def test_tasks_back_to_back_in_the_same_memory(pool: AssistPool, loras: Loras) -> None:
    for num_rows in range(1, 60):
        check(pool, loras, num_rows)


def test_many_tasks_at_one_signal(pool: AssistPool, loras: Loras) -> None:
    pool.x.normal_()
    expected = loras.expected(pool.x.view(ROWS, IN)).float()
    for row in range(ROWS):
        ticket = pool.submit(loras.task(1, x_start=row * IN, y_start=row * OUT))
    pool.start(ticket)
    assert pool.wait(ticket, WAIT_S)
    torch.testing.assert_close(pool.y[: ROWS * OUT].view(ROWS, OUT), expected, rtol=1e-5, atol=1e-5)


def test_a_task_without_parts_only_goes_round(pool: AssistPool, loras: Loras) -> None:
    pool.y.fill_(float("nan"))
    ticket = pool.submit(loras.task(1, parts=()))
    pool.start(ticket)
    assert pool.wait(ticket, WAIT_S)
    assert pool.y.isnan().all()


def test_weights_that_came_later_are_known_to_all(pool: AssistPool) -> None:
    for _ in range(3):
        check(pool, Loras(pool, torch.float32, ranks=(4, 12)), ROWS)


def test_workers_without_tasks_sleep_until_the_next(pool: AssistPool, loras: Loras) -> None:
    check(pool, loras, ROWS)
    assert eventually(lambda: all(process_state(pid) == "S" for pid in pool.pids.values()))
    check(pool, loras, ROWS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_narrow_types(dtype: torch.dtype) -> None:
    with running_pool(1, dtype) as pool:
        loras = Loras(pool, dtype, ranks=(1, 16, 19))
        for num_rows in (1, 32, 77):
            check(pool, loras, num_rows)


def test_a_pool_without_workers_computes_all_the_same() -> None:
    with running_pool(0) as pool:
        assert pool.num_workers == 0
        loras = Loras(pool, torch.float32, ranks=(3, 8))
        for num_rows in (1, 100, ROWS):
            check(pool, loras, num_rows)


def test_a_full_ring_is_an_error_and_recovers() -> None:
    with running_pool(0, ring_size=4) as pool:
        loras = Loras(pool, torch.float32)
        for _ in range(4):
            ticket = pool.submit(loras.task(1))
        with pytest.raises(CapacityError, match="4 tasks wait"):
            pool.submit(loras.task(1))
        pool.start(ticket)
        assert pool.wait(ticket, WAIT_S)
        check(pool, loras, 10)


def test_a_task_that_the_pool_did_not_live_to_do_is_an_error() -> None:
    with running_pool(0) as pool:
        ticket = pool.submit(Loras(pool, torch.float32).task(5))
    with pytest.raises(EngineDeadError, match="ended before"):
        pool.wait(ticket, WAIT_S)


def test_a_product_that_cannot_be_computed_is_told_to_who_waits() -> None:
    with running_pool(0, patience=Patience()) as pool:
        loras = Loras(pool, torch.float32)
        ticket = pool.submit(loras.task(5))
        loras.block.close()
        pool.start(ticket)
        with pytest.raises(EngineDeadError, match="could not be computed"):
            pool.wait(ticket, WAIT_S)


def check_split(pool: AssistPool, rows_each: int) -> None:
    """Check that a second worker has a part in a task from the first row on that is beyond so many."""
    loras = Loras(pool, torch.float32)
    for num_rows, num_workers in ((rows_each, 1), (rows_each + 1, 2)):
        ticket = pool.submit(loras.task(num_rows))
        shares = [pool.control.read(ticket, slot)[1] for slot in range(2)]
        assert shares == split_task(num_rows, [0], [True, True], rows_each)
        assert sum(share.end > share.start for share in shares) == num_workers
        pool.start(ticket)
        assert pool.wait(ticket, WAIT_S)


def test_tasks_are_split_by_the_rows_that_are_given(pool: AssistPool) -> None:
    assert pool.rows_each == GIVEN_ROWS
    check_split(pool, GIVEN_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("rows_each", [32, 64, 128])
def test_tasks_are_split_by_the_rows_that_their_cost_is_predicted_with(rows_each: int) -> None:
    with running_pool(2, rows_each=rows_each) as pool:
        assert pool.rows_each == rows_each
        check_split(pool, rows_each)


@pytest.mark.slow
def test_tasks_are_split_by_the_rows_that_workers_measure_unless_they_are_given() -> None:
    with running_pool(2) as pool:
        assert pool.rows_each in PROFILED_ROWS
        check_split(pool, pool.rows_each)
