"""Time as a value that is handed in, so that deciding code runs on a real or a virtual clock alike."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment; never goes backwards."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to: for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0.0, "time does not go backwards"
        self._now_s += seconds
