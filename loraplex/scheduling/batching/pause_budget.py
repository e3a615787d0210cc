"""Bounds how long running requests pause, so that those waiting for their places are not delayed too much.

A request that pauses keeps its place, and gives it to one that waits that much later. So in any period,
pauses may add up to no more than a request that arrived at its beginning may be delayed:

    sum of pauses since t  <=  max(share * (now - t), seconds)        for every t

It is enough to look at the times at which pauses began. For those longer ago than seconds / share the first
term is the larger one, and only the least of `sum before t - share * t` is kept of them.
"""

from __future__ import annotations

import math
from collections import deque

from loraplex.core.batching import PAUSE_SHARE, DelayBound


class PauseBudget:
    """The pauses of requests that may still run."""

    def __init__(self, bound: DelayBound) -> None:
        self._share = PAUSE_SHARE * bound.share
        self._seconds = PAUSE_SHARE * bound.seconds
        self._recent_s = math.inf if self._share == 0.0 else self._seconds / self._share
        self.clear()

    def clear(self) -> None:
        """Forget all pauses: nobody waits, and no request still has a place because of them."""
        self._sum_s = 0.0
        self._recent: deque[tuple[float, float]] = deque()  # when a pause began, and the sum before it
        self._least_s = math.inf  # sum before a pause - share * when it began, of pauses longer ago

    def allows(self, seconds: float, now_s: float) -> bool:
        """Return whether requests may pause so long from now on."""
        recent = self._recent
        while recent and now_s - recent[0][0] > self._recent_s:
            began_s, sum_before_s = recent.popleft()
            self._least_s = min(self._least_s, sum_before_s - self._share * began_s)
        sum_s = self._sum_s + seconds
        of_recent_s = sum_s - (recent[0][1] if recent else self._sum_s)
        return of_recent_s <= self._seconds and sum_s - self._share * now_s <= self._least_s

    def spend(self, seconds: float, now_s: float) -> None:
        """Record that requests pause so long from now on."""
        self._recent.append((now_s, self._sum_s))
        self._sum_s += seconds
