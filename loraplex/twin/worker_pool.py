"""A pool of worker processes on all cores, which end with the process that started them."""

from __future__ import annotations

import multiprocessing.context
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from loraplex.core.errors import UserError


class _Worker(multiprocessing.context.SpawnProcess):
    """A process that ignores Ctrl-C from its first instruction: Ctrl-C reaches every process of a terminal,
    and the owner decides what it means. A blocked signal stays blocked in the child process."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Context(multiprocessing.context.SpawnContext):
    Process = _Worker


@contextmanager
def worker_pool(
    num_tasks: int, initializer: Callable[..., object] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool for `num_tasks` tasks. If the context is left by an exception, or the process is
    interrupted or killed, running tasks are abandoned, and the workers end.

    Raises UserError if a worker is killed, as a system short of memory does."""
    num_workers = max(min(len(os.sched_getaffinity(0)), num_tasks), 1)
    context = _Context()
    # Nothing is ever sent: workers wait for the end of the connection, which closes with this process.
    receiver, sender = context.Pipe(duplex=False)
    with (
        receiver,
        sender,
        _interrupted_by(sender.close),
        ProcessPoolExecutor(num_workers, context, _begin, (receiver, initializer, initargs)) as pool,
    ):
        try:
            yield pool
        except BrokenProcessPool as error:
            sender.close()
            raise UserError(
                "a worker process was killed, perhaps for lack of memory; run fewer policies and seeds at "
                "once, or a shorter workload, or give it more memory"
            ) from error
        except BaseException:
            sender.close()  # the pool ends with its workers
            raise


@contextmanager
def _interrupted_by(end_workers: Callable[[], None]) -> Iterator[None]:
    """On Ctrl-C or SIGTERM, end the workers, and apply the signal's previous handling when the context is
    left, which is soon: without workers every wait for a result fails. Handled at once, it could leave a lock
    of the pool held forever, and the pool would never end; and a process that SIGTERM ends at once leaves
    semaphores behind, of which Python warns. A second signal is handled as before at once."""
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN)
    }
    if threading.current_thread() is not threading.main_thread():
        handlers = {}  # signals are handled by the main thread
    received: int | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number
        signal.signal(number, handlers[signal.Signals(number)])
        end_workers()

    for number in handlers:
        signal.signal(number, interrupt)
    try:
        yield
    except Exception:
        if received is None:
            raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    if received is not None:
        raise SystemExit(128 + received)


def _begin(owner: Connection, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    if initializer is not None:
        initializer(*initargs)


def _end_with(owner: Connection) -> None:
    try:
        owner.recv()
    except (EOFError, OSError):
        os._exit(1)
