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

from loraplex.twin.worker_pool import worker_pool

OWNER = """
import os, time
from loraplex.twin.worker_pool import worker_pool

if __name__ == "__main__":
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 1000).result()
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


def test_results_come_back_from_prepared_workers() -> None:
    with worker_pool(2, os.putenv, ("LORAPLEX_TEST", "1")) as pool:
        assert list(pool.map(abs, (-1, -2, 3))) == [1, 2, 3]
