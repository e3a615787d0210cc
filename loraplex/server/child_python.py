"""The Python that child processes run on, and how they are started without hearing Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def same_python() -> list[str]:
    """Return the command of this Python. A child looks into the current folder only if this process does: a
    stray torch.py there must not shadow the real one."""
    sees_cwd = "" in sys.path or os.getcwd() in sys.path
    return [sys.executable] if sees_cwd else [sys.executable, "-P"]


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start children in this block that are to ignore SIGINT from their first instruction: Ctrl-C reaches
    every process of the terminal, and Python's imports would end in a traceback.

    They inherit the block, and lift it with `ignore_interrupts`. This process handles a SIGINT of meanwhile
    when the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore SIGINT from now on, one that is blocked included; children of this process do as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
