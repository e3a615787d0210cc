"""Handling of signals before a server has its own handlers, or in a command that must remove files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_STDERR: Final = 2


@contextmanager
def exit_0_on_signal() -> Iterator[None]:
    """Exit with 0 on SIGINT and SIGTERM, as a server does after its start; its handlers replace these."""

    def exit_0(number: int, frame: FrameType | None) -> None:
        os.write(_STDERR, b"shut down before the start\n")  # not print: the signal may interrupt one
        sys.exit(0)

    before = {number: signal.signal(number, exit_0) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit on SIGTERM with the usual code, but through `sys.exit`, so that open blocks clean up first."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # it is ignored or already handled
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
