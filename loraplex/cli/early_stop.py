"""Signals that reach a server before it handles them itself, or a command that has files to remove."""

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
    """Exit with 0 on SIGINT and SIGTERM, as a server does after its start; its own handlers replace these."""

    def exit_0(number: int, frame: FrameType | None) -> None:
        os.write(_STDERR, b"shut down before the start\n")  # not by print: the signal may come in one
        sys.exit(0)

    before = {number: signal.signal(number, exit_0) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit as after SIGTERM, but not before the blocks that the signal comes in have put things in order."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # it is ignored, or somebody else handles it
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
