"""A CPU LoRA worker: `python -m loraplex.engine.assist.worker LAUNCH`.

It prepares the next task as soon as that is submitted, waits for its signal, computes its rows and writes the
ticket to its done word. While the pool is armed it spins on its core; otherwise it sleeps until it is woken.
It always ends with its parent.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final

import torch

from loraplex.core.logs import logging_to_stderr
from loraplex.engine.assist.control import Control
from loraplex.engine.assist.messages import Go, Launch, Weights, receive, send_ready
from loraplex.engine.assist.product import Product, profile
from loraplex.engine.assist.shared_block import SharedBlock

logger = logging.getLogger(__name__)

EXIT_PARENT_GONE: Final = 3
_SPINS: Final = 20_000
"""Spins, about a millisecond of them, before a worker checks whether it is to end or sleep."""
_LOOK_AROUND_MS: Final = 1000
_PR_SET_PDEATHSIG: Final = 1


class Worker:
    """The worker's side of the pool."""

    def __init__(self, launch: Launch) -> None:
        self._slot = launch.slot
        self._parent_pid = launch.parent_pid
        self._channel = socket.socket(fileno=launch.socket_fd)
        control = SharedBlock(launch.control_bytes, fd=launch.control_fd)
        self._control = Control(control, launch.num_slots, launch.ring_size)
        self._product = Product(
            getattr(torch, launch.dtype),
            SharedBlock(launch.x_bytes, fd=launch.x_fd).memory,
            SharedBlock(launch.y_bytes, fd=launch.y_fd).memory,
        )
        self._weights: dict[int, torch.Tensor] = {}
        self._first_ticket: int | None = None

    def run(self, times_us: dict[int, float]) -> None:
        """Report ready, and compute tasks until the pool or the parent ends."""
        send_ready(self._channel, times_us)
        while self._first_ticket is None:
            if not self._listen():
                return
        ticket = self._first_ticket
        while self._await(self._control.wait_submitted, ticket):
            work = self._prepare(ticket)
            if work is None or not self._await(self._control.wait_signal, ticket):
                return
            if not self._control.is_skipped(ticket):
                work()
            self._control.set_done(self._slot, ticket)
            ticket += 1

    def _prepare(self, ticket: int) -> Callable[[], object] | None:
        """Return the work to do at the signal; None if the worker is to end."""
        task, share = self._control.read(ticket, self._slot)
        if share.start == share.end:
            return lambda: None
        while any(part.weights not in self._weights for part in task.parts):
            if not self._listen():  # they were sent before the task was written
                return None
        return self._product.prepare(task, self._weights, share.start, share.end)

    def _await(self, reached: Callable[[int, int], bool], ticket: int) -> bool:
        """Wait until the ticket is reached; return False if the worker is to end instead."""
        while not reached(ticket, _SPINS):
            if self._is_over():
                return False
            if not self._control.is_armed and not self._listen():
                return False
            os.sched_yield()
        return True

    def _is_over(self) -> bool:
        return self._control.is_stopped or os.getppid() != self._parent_pid

    def _listen(self) -> bool:
        """Sleep until there is a message, and handle it; return False if there will be no more."""
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        while not readable.poll(_LOOK_AROUND_MS):
            if self._is_over():
                return False
        message = receive(self._channel)
        if isinstance(message, Weights):
            block = SharedBlock(message.num_bytes, fd=message.fd)
            self._weights[message.index] = block.memory
            block.close()
        elif isinstance(message, Go):
            self._first_ticket = message.first_ticket
        return message is not None


def _leave_with_parent(parent_pid: int) -> None:
    # Thus even a stopped process ends with its parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(EXIT_PARENT_GONE)


def main() -> int:
    launch = Launch.from_json(sys.argv[1])
    _leave_with_parent(launch.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    with logging_to_stderr(launch.log_level, launch.log_format, f"worker {launch.slot}"):
        return _run(launch)


def _run(launch: Launch) -> int:
    try:
        os.sched_setaffinity(0, {launch.core})
    except OSError as error:
        logger.warning("CPU LoRA worker %d is on no core of its own: %s", launch.slot, error.strerror)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    in_features, out_features, rank = launch.profiled
    times_us = profile(getattr(torch, launch.dtype), in_features, out_features, rank)
    Worker(launch).run(times_us)
    return 0


if __name__ == "__main__":
    os._exit(main())  # nothing is left to save, and torch takes a second to shut down
