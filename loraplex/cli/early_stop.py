"""A server that is told to end before it listens to signals."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ends_with_0_when_told() -> Iterator[None]:
    """Leave with 0 on SIGINT and SIGTERM, as the server does after its start. Those of the server take the
    place of these handlers."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(0)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
