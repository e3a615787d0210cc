"""Threads that a process does not wait for when it exits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class HelperThreads(Executor):
    """A pool of daemon threads that are started when needed.

    Python's own pool joins its threads when the interpreter exits, which never ends if one of them hangs in a
    read.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._num_threads = 0
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor. Called by one thread at a time, and never after `shutdown`."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(run)
        if self._num_threads < self._max_threads:
            self._num_threads += 1
            threading.Thread(target=self._work, name="adapter-reader", daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End each thread after the tasks submitted so far, without waiting for it."""
        assert not wait
        assert not cancel_futures
        for _ in range(self._num_threads):
            self._tasks.put(None)

    def _work(self) -> None:
        while (run := self._tasks.get()) is not None:
            run()
