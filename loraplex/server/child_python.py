"""The Python command that child processes run, and how they are started so that they ignore Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def same_python() -> list[str]:
    """Return the command of this Python. A child imports from the current folder only if this process does: a
    stray torch.py there must not shadow the real one."""
    sees_cwd = "" in sys.path or os.getcwd() in sys.path
    return [sys.executable] if sees_cwd else [sys.executable, "-P"]


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT while children are started that must ignore it from their first instruction: Ctrl-C
    reaches every process of the terminal, and would end Python's imports in a traceback.

    Children inherit the signal mask and lift it with `ignore_interrupts`. This process handles a SIGINT that
    arrived meanwhile when the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore SIGINT from now on, including one that is blocked; children of this process inherit this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
