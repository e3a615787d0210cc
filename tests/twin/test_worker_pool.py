"""Worker processes end with the process that started them, whatever happens to it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loraplex.core.errors import UserError
from loraplex.twin.worker_pool import worker_pool

# The scripts hear SIGINT also where tests run in the background of a shell, whose programs ignore it.
OWNER = """
import os, signal, time
from loraplex.twin.worker_pool import worker_pool

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 1000).result()
"""

# Interrupted when the main thread has just taken a lock of the future that it is about to wait for.
INTERRUPTED_WITH_A_LOCK = """
import signal, sys, threading, time
from loraplex.twin.worker_pool import worker_pool

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    enter = threading.Condition.__enter__

    def interrupted(condition):
        found = enter(condition)
        if threading.current_thread() is threading.main_thread():
            threading.Condition.__enter__ = enter
            signal.raise_signal(signal.SIGINT)
        return found

    try:
        with worker_pool(1) as pool:
            task = pool.submit(time.sleep, 1000)
            threading.Condition.__enter__ = interrupted
            task.result()
    except KeyboardInterrupt:
        sys.exit(130)
"""

# Workers import this module, say so and wait for the end of their input.
INTERRUPTED_WHILE_STARTING = """
import os, signal, sys
from loraplex.twin.worker_pool import worker_pool

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with worker_pool(2) as pool:
            list(pool.map(abs, (-1, 2)))
    except KeyboardInterrupt:
        sys.exit(130)
else:
    os.write(1, b"importing\\n")
    os.read(0, 1)
"""


def has_ended(pid: int) -> bool:
    """Wait for the end of a process that is no child of this one."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 60.0)[0])
    finally:
        os.close(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_owner(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER, encoding="utf-8")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        owner.send_signal(number)
        owner.communicate(timeout=60)
    assert has_ended(worker)


def test_an_interrupt_leaves_no_lock_behind(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(INTERRUPTED_WITH_A_LOCK, encoding="utf-8")
    found = subprocess.run([sys.executable, script], capture_output=True, timeout=60, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, b"", b"")


def test_sigterm_leaves_neither_semaphores_nor_words_behind(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER, encoding="utf-8")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        owner.send_signal(signal.SIGTERM)
        _, said = owner.communicate(timeout=60)
    assert (owner.returncode, said) == (128 + signal.SIGTERM, b"")


def test_ctrl_c_while_workers_start_ends_all_of_them_without_a_word(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(INTERRUPTED_WHILE_STARTING, encoding="utf-8")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, script], start_new_session=True, **pipes) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"importing\n"
        os.killpg(owner.pid, signal.SIGINT)  # as a terminal does
        _, said = owner.communicate(timeout=60)
    assert (owner.returncode, said) == (130, b"")


def test_tasks_under_way_are_given_up_when_the_block_fails() -> None:
    workers: list[int] = []

    def fail() -> None:
        with worker_pool(1) as pool:
            workers.append(pool.submit(os.getpid).result())
            pool.submit(time.sleep, 1000)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert has_ended(workers[0])


def test_a_worker_that_is_killed_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UserError, match="a worker process was killed"), worker_pool(2) as pool:
        pool.submit(signal.raise_signal, signal.SIGKILL).result()


def test_results_come_back_from_prepared_workers() -> None:
    with worker_pool(2, os.putenv, ("LORAPLEX_TEST", "1")) as pool:
        assert list(pool.map(abs, (-1, -2, 3))) == [1, 2, 3]
