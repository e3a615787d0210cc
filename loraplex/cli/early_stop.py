"""Signals that reach a server before it handles them itself."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exit_0_on_signal() -> Iterator[None]:
    """Exit with 0 on SIGINT and SIGTERM, as a server does after its start; its own handlers replace these."""

    def exit_0(number: int, frame: FrameType | None) -> None:
        sys.exit(0)

    before = {number: signal.signal(number, exit_0) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
