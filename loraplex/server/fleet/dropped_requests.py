"""Servers that report to be healthy but drop requests: they are set aside for a while.

    requests are dropped, one after the other ──▶ aside ──pause, and a prompt completed──▶ tried again
                                                    ▲                                        │ dropped
                                                    └────────── twice the pause ─────────────┘

A first token ends this. Requests that were in flight when another one was dropped do not count: whatever
broke that connection may have broken theirs too.
"""

from __future__ import annotations

from typing import Final

from loraplex.core.clock import Clock

_MAX_IN_A_ROW: Final = 3


class DroppedRequests:
    """Decides when a server is set aside, and when it is tried again. `reason`: why it is set aside; None if
    it is not. `is_cut`: connections break, so nobody needs to wait long; otherwise the server says that it is
    not ready."""

    def __init__(self, clock: Clock, pause_s: tuple[float, float]) -> None:
        """`pause_s`: the first and the longest pause in seconds."""
        self._clock = clock
        self._first_s, self._most_s = pause_s
        self._pause_s = self._first_s
        self._num_in_a_row = 0
        self._until_s = 0.0
        self.era = 0
        """Number of requests counted as dropped; identifies the period that a request was sent in."""
        self.reason: str | None = None
        self.is_cut = False

    def answered(self) -> None:
        """Record that a request has its first token."""
        self._num_in_a_row, self._pause_s, self.reason = 0, self._first_s, None

    def dropped(self, era: int, why: str, *, is_cut: bool) -> bool:
        """Record that a request sent in `era` was dropped before its first token; return whether the server
        is now set aside."""
        if era != self.era or self.reason is not None:
            return False
        self.era += 1
        self._num_in_a_row += 1
        if self._num_in_a_row < _MAX_IN_A_ROW:
            return False
        self.set_aside(why, is_cut=is_cut)
        return True

    @property
    def is_due(self) -> bool:
        """Return whether a server that is set aside should be tried now."""
        return self.reason is not None and self._clock.now_s() >= self._until_s

    def failed_again(self, why: str) -> None:
        """Record that the server was tried and did not complete a prompt."""
        self.set_aside(why, is_cut=self.is_cut)

    def try_again(self) -> None:
        """Allow requests again; if the next one is dropped, the server is set aside for longer."""
        self.reason = None

    def set_aside(self, why: str, *, is_cut: bool) -> None:
        """Send it no requests for a while, twice as long each time."""
        self.reason, self.is_cut = why, is_cut
        self._until_s = self._clock.now_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._most_s)
