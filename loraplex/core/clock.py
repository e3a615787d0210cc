"""Clocks that are passed in, so that the same decisions run on a real or a virtual clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds since some fixed moment; never goes backwards."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A virtual clock that moves only by `advance`: for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0.0, "time does not go backwards"
        self._now_s += seconds
