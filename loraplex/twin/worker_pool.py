"""A pool of worker processes on all cores, which end at once with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any


@contextmanager
def worker_pool(
    num_tasks: int, initializer: Callable[..., object] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool for so many tasks. If the block is left by an exception, or the process is killed, tasks
    under way are given up: nobody waits for them, and no worker goes on without its owner."""
    num_workers = max(min(len(os.sched_getaffinity(0)), num_tasks), 1)
    context = multiprocessing.get_context("spawn")
    # Nothing is ever sent: workers wait for the end of the connection, which closes with this process.
    receiver, sender = context.Pipe(duplex=False)
    with (
        receiver,
        sender,
        ProcessPoolExecutor(num_workers, context, _begin, (receiver, initializer, initargs)) as pool,
    ):
        try:
            yield pool
        except BaseException:
            sender.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(owner: Connection, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> None:
    # Ctrl-C reaches every process of a terminal: the owner decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    if initializer is not None:
        initializer(*initargs)


def _end_with(owner: Connection) -> None:
    try:
        owner.recv()
    except (EOFError, OSError):
        os._exit(1)
