"""Servers that are well by their own account and drop requests: they are set aside for a while.

    requests are dropped, one after the other ──▶ aside ──pause, and a prompt completed──▶ tried again
                                                    ▲                                        │ dropped
                                                    └────────── twice the pause ─────────────┘
A first token ends it. Requests that were under way when another one was dropped do not count: whatever broke
that connection may have broken theirs.
"""

from __future__ import annotations

from typing import Final

from loraplex.core.clock import Clock

_MAX_IN_A_ROW: Final = 3


class DroppedRequests:
    """Decides when a server is set aside, and when it is tried again. `reason`: why it is, None if it is not.
    `is_cut`: connections break, so that nobody need wait for long; else it says that it is not ready."""

    def __init__(self, clock: Clock, pause_s: tuple[float, float]) -> None:
        """`pause_s`: the first and the longest."""
        self._clock = clock
        self._first_s, self._most_s = pause_s
        self._pause_s = self._first_s
        self._num_in_a_row = 0
        self._until_s = 0.0
        self.era = 0
        """Changes with every request that counts as dropped."""
        self.reason: str | None = None
        self.is_cut = False

    def answered(self) -> None:
        """A request has its first token."""
        self._num_in_a_row, self._pause_s, self.reason = 0, self._first_s, None

    def dropped(self, era: int, why: str, *, is_cut: bool) -> bool:
        """A request that was sent in `era` was dropped before its first token; returns whether the server is
        set aside for it."""
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
        """Tell whether a server that is set aside is to be tried."""
        return self.reason is not None and self._clock.now_s() >= self._until_s

    def failed_again(self, why: str) -> None:
        """It was tried, and does not complete a prompt either."""
        self.set_aside(why, is_cut=self.is_cut)

    def try_again(self) -> None:
        """Send it requests; the next one that it drops sets it aside for longer."""
        self.reason = None

    def set_aside(self, why: str, *, is_cut: bool) -> None:
        """Send it no requests for a while, which is twice as long each time."""
        self.reason, self.is_cut = why, is_cut
        self._until_s = self._clock.now_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._most_s)
