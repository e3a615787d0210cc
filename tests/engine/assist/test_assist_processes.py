"""Workers that die, hang or cannot start are not noticed in what comes out, and none outlives its pool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from assist_pools import (
    READY_S,
    ROWS,
    WAIT_S,
    Loras,
    assert_equal,
    check,
    done_word,
    eventually,
    open_fds,
    process_state,
    running_pool,
    submit_random,
)

from loraplex.engine.assist import crew, process
from loraplex.engine.assist.crew import Patience
from loraplex.engine.assist.messages import Launch
from loraplex.engine.assist.pool import AssistPool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[AssistPool]:
    with running_pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def loras(pool: AssistPool) -> Loras:
    return Loras(pool, torch.float32, ranks=(8, 5))


def await_replacements(pool: AssistPool, *gone: int) -> None:
    """All workers are there again, and none of them is one of those."""
    assert eventually(lambda: pool.num_workers == 2 and set(gone).isdisjoint(pool.pids.values()), READY_S)


def check_both_work(pool: AssistPool, loras: Loras) -> None:
    ticket, expected = submit_random(pool, loras, ROWS)
    pool.start(ticket)
    assert pool.wait(ticket, WAIT_S)
    assert_equal(pool, expected)
    assert [done_word(pool, slot) for slot in (0, 1)] == [ticket, ticket]


def test_killed_before_its_task_starts(pool: AssistPool, loras: Loras) -> None:
    victim = pool.pids[1]
    ticket, expected = submit_random(pool, loras, ROWS)
    os.kill(victim, signal.SIGKILL)
    pool.start(ticket)
    assert pool.wait(ticket, WAIT_S)
    assert_equal(pool, expected)
    await_replacements(pool, victim)
    check_both_work(pool, loras)


def test_killed_in_the_middle_of_its_task(pool: AssistPool, loras: Loras) -> None:
    victim = pool.pids[0]
    os.kill(victim, signal.SIGSTOP)
    assert eventually(lambda: process_state(victim) == "T")
    ticket, expected = submit_random(pool, loras, ROWS)
    pool.start(ticket)
    assert eventually(lambda: done_word(pool, 1) == ticket)
    assert not pool.wait(ticket, 0.01)
    os.kill(victim, signal.SIGKILL)
    assert pool.wait(ticket, WAIT_S)
    assert_equal(pool, expected)
    await_replacements(pool, victim)
    check_both_work(pool, loras)


def test_killed_among_many_tasks(pool: AssistPool, loras: Loras) -> None:
    victim = pool.pids[1]
    first, expected = submit_random(pool, loras, ROWS)
    for _ in range(200):
        last = pool.submit(loras.task(ROWS))
    pool.start(last)
    assert eventually(lambda: done_word(pool, 1) >= first + 20)
    os.kill(victim, signal.SIGKILL)
    assert pool.wait(last, WAIT_S)
    assert_equal(pool, expected)
    await_replacements(pool, victim)


def test_all_killed_at_once(pool: AssistPool, loras: Loras) -> None:
    victims = list(pool.pids.values())
    ticket, expected = submit_random(pool, loras, ROWS)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    pool.start(ticket)
    assert pool.wait(ticket, WAIT_S)
    assert_equal(pool, expected)
    for num_rows in (1, ROWS):  # nobody is back yet
        check(pool, loras, num_rows)
    await_replacements(pool, *victims)
    check_both_work(pool, loras)


def test_killed_between_tasks_and_weights_added_meanwhile(pool: AssistPool) -> None:
    victim = pool.pids[0]
    os.kill(victim, signal.SIGKILL)
    later = Loras(pool, torch.float32, ranks=(6,))
    check(pool, later, ROWS)
    await_replacements(pool, victim)
    check_both_work(pool, later)


def test_a_worker_that_hangs_is_killed_and_its_rows_computed() -> None:
    with running_pool(1, patience=Patience(slice_s=0.2)) as pool:
        loras = Loras(pool, torch.float32)
        victim = pool.pids[0]
        os.kill(victim, signal.SIGSTOP)
        check(pool, loras, ROWS)
        assert process_state(victim) is None  # it can never write into memory that has a new use
        check(pool, loras, 40)


@pytest.mark.parametrize("program", ["/no/such/python", "/bin/false"])
def test_workers_that_cannot_start_are_done_without(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with AssistPool(num_workers=2, dtype=torch.float32, x_elements=100_000, y_elements=200_000) as pool:
        assert pool.wait_ready(WAIT_S) == 0
        check(pool, Loras(pool, torch.float32), ROWS)


def test_closing_leaves_no_process_and_no_descriptor() -> None:
    before = open_fds()
    with running_pool(2) as pool:
        loras = Loras(pool, torch.float32)
        check(pool, loras, 50)
        pids = list(pool.pids.values())
        os.kill(pids[0], signal.SIGSTOP)
        pool.submit(loras.task(5))  # never started
    pool.close()
    loras.block.close()
    assert [process_state(pid) for pid in pids] == [None, None]
    assert open_fds() == before


def test_workers_that_are_still_starting_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would read that they should leave once they have imported torch."""
    monkeypatch.setattr(crew, "_LEAVE_S", WAIT_S)
    spawn, spawned = process._spawn, list[subprocess.Popen[bytes]]()

    def noted(launch: Launch) -> subprocess.Popen[bytes]:
        spawned.append(spawn(launch))
        return spawned[-1]

    monkeypatch.setattr(process, "_spawn", noted)
    with AssistPool(num_workers=1, dtype=torch.float32, x_elements=100, y_elements=100):
        assert eventually(lambda: bool(spawned))
    assert [worker.returncode for worker in spawned] == [-signal.SIGKILL]


PARENT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from assist_pools import running_pool
with running_pool(2) as pool:
    print(*pool.pids.values(), flush=True)
    pool.arm()
    sys.stdin.read()
"""


def test_workers_leave_with_a_parent_that_was_killed() -> None:
    folder = os.path.dirname(__file__)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
    assert eventually(lambda: all(process_state(pid) is None for pid in pids))
