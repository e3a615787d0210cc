"""Shard 0's view of the worker processes: starts them, sends calls, and detects their end."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from typing import Any, Final

from loraplex.core.errors import EngineDeadError
from loraplex.core.exits import describe_exit
from loraplex.engine.executor import AdapterEvent
from loraplex.engine.parallel.messages import Answer, Call, Done, Failed, Launch, Ready, Started

_WORKER_MODULE: Final = "loraplex.engine.parallel.worker"
_LAST_WORDS_S: Final = 5.0
"""Seconds to look for an ended process after a failed collective: the others notice its closed connections
before it has exited."""
_CLOSE_S: Final = 10.0
"""Seconds that processes may take to exit when asked to."""


class Workers:
    """The processes of all shards but the first. Used by one thread.

    `on_end` is called by another thread when a process ends unexpectedly: a collective that waits for it
    might never return.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self._workers: dict[int, _Worker] = {}
        self._inbox: queue.SimpleQueue[tuple[int, Answer | None]] = queue.SimpleQueue()
        self._events: list[tuple[int, AdapterEvent]] = []
        self._answers: set[tuple[int, type[Answer]]] = set()
        self._ended: dict[int, str] = {}
        self._closing = False
        self._patience_s = 0.0  # while workers start, `close` does not wait for them
        try:
            for launch in launches:
                self._start(launch)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by shard."""
        return {index: worker.process.pid for index, worker in self._workers.items()}

    def call(self, method: str, *args: Any, only: int | None = None, wants_answer: bool = False) -> None:
        """Call a method of every shard's executor, or only of one shard's.

        Does not report whether the processes are alive: `raise_if_ended` does.
        """
        data = pickle.dumps(Call(method=method, args=args, wants_answer=wants_answer))
        for index, worker in self._workers.items():
            if only is None or only == index:
                with contextlib.suppress(OSError):
                    worker.calls.send_bytes(data)

    def wait_started(self) -> None:
        """Wait until all are about to connect. This and the other waits raise EngineDeadError if a process
        has ended."""
        self._wait_for(Started)

    def wait_ready(self) -> None:
        self._wait_for(Ready)
        self._patience_s = _CLOSE_S

    def wait_done(self) -> None:
        """Wait until all have executed a call that wants an answer."""
        self._wait_for(Done)

    @property
    def has_events(self) -> bool:
        """Return whether `take_events` may return any without waiting."""
        return bool(self._events) or not self._inbox.empty()

    def take_events(self, timeout_s: float) -> list[tuple[int, AdapterEvent]]:
        """Return the loads that ended, each with its shard; wait up to `timeout_s` for the first of them."""
        self.raise_if_ended()
        if not self._events and timeout_s > 0.0:
            self._receive(timeout_s=timeout_s)
            self.raise_if_ended()
        events, self._events = self._events, []
        return events

    def raise_if_ended(self) -> None:
        """Raise EngineDeadError, naming the shards, if any process has ended."""
        while self._receive(timeout_s=0.0):
            pass
        if self._ended:
            reasons = "; ".join(f"shard {index}: {why}" for index, why in sorted(self._ended.items()))
            raise EngineDeadError(f"a tensor-parallel process ended ({reasons})")

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Report an error inside this context as the end of a process, if one has ended."""
        try:
            yield
        except RuntimeError:
            until = time.monotonic() + _LAST_WORDS_S
            while not self._ended and (left := until - time.monotonic()) > 0.0:
                self._receive(timeout_s=left)
            self.raise_if_ended()
            raise

    def close(self) -> None:
        """Wait for the processes to end, and kill those that do not. Idempotent."""
        self._closing = True
        for worker in self._workers.values():
            worker.calls.close()
        until = time.monotonic() + self._patience_s
        for worker in self._workers.values():
            worker.end(timeout_s=max(until - time.monotonic(), 0.0))

    def _start(self, launch: Launch) -> None:
        index = launch.shard.index
        worker = self._workers[index] = _Worker(launch)
        threading.Thread(
            target=self._listen, args=(index, worker), name=f"shard-{index}", daemon=True
        ).start()

    def _wait_for(self, kind: type[Answer]) -> None:
        wanted = {(index, kind) for index in self._workers}
        while not wanted <= self._answers:
            self._receive(timeout_s=None)
            self.raise_if_ended()
        self._answers -= wanted

    def _receive(self, timeout_s: float | None) -> bool:
        """Process one message, waiting for it (None: without limit). Return False if there was none."""
        try:
            index, answer = self._inbox.get(block=timeout_s != 0.0, timeout=timeout_s)
        except queue.Empty:
            return False
        if answer is None:
            self._ended.setdefault(index, describe_exit(self._workers[index].process.returncode))
        elif isinstance(answer, Failed):
            self._ended[index] = answer.reason
        elif isinstance(answer, AdapterEvent):
            self._events.append((index, answer))
        else:
            self._answers.add((index, type(answer)))
        return True

    def _listen(self, index: int, worker: _Worker) -> None:
        """Receive the answers of one process until it ends; runs in a thread of its own."""
        while True:
            try:
                answer: Answer | None = worker.answers.recv()
            except (EOFError, OSError):
                answer = None
                worker.process.wait()
            self._inbox.put((index, answer))
            if not self._closing and (answer is None or isinstance(answer, Failed)):
                self.on_end()
            if answer is None:
                return


class _Worker:
    """One process, and the pipes to and from it."""

    def __init__(self, launch: Launch) -> None:
        their_calls, self.calls = Pipe(duplex=False)
        self.answers, their_answers = Pipe(duplex=False)
        with their_calls, their_answers:
            self.process = _spawn(their_calls.fileno(), their_answers.fileno(), launch.num_threads)
        with contextlib.suppress(OSError):  # it has ended already; its exit code is reported
            self.calls.send(launch)

    def end(self, timeout_s: float) -> None:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


def _spawn(calls_fd: int, answers_fd: int, num_threads: int) -> subprocess.Popen[bytes]:
    # A command of its own rather than a `multiprocessing` child, which would run the user's script again.
    # It imports from the current folder only if we do: a stray torch.py there must not shadow ours.
    sees_cwd = "" in sys.path or os.getcwd() in sys.path
    python = [sys.executable] if sees_cwd else [sys.executable, "-P"]
    return subprocess.Popen(
        [*python, "-m", _WORKER_MODULE, str(calls_fd), str(answers_fd)],
        stdin=subprocess.PIPE,  # stays open while this process lives
        stdout=2,
        pass_fds=(calls_fd, answers_fd),
        env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
    )
