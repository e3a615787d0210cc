"""The lags of running requests' places: they become free later than first come, first served, or sooner.

A request that pauses for a step of `w` seconds ends that much later than if it had run, and the request that
waits for its place gets it that much later. One that runs merged instead, where a step of all requests would
take `u` seconds, ends `u - w` sooner. What a place is behind goes on to the next request on it. What it is
ahead does not: of few places, one that is ahead would let others wait for long.

    place 1   [ a: paused for 0.2 s  ][ c: 0.2 s behind from its first step on ]
    place 2   [ b: ran merged ][ d: neither behind nor ahead                   ]

A request that waits takes whichever place is free first. So it is never later than the place that is furthest
behind. Of many places a mean is enough: at any time about `sum of lags / (places * gap)` ends are missing,
where `gap` is the time between two ends, with a standard deviation of the root of that, as requests end at
random.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

from loraplex.scheduling.request_state import RequestState

_RECENT: Final = 32
"""Ends of requests that the gap is taken from."""
_CAUTION: Final = 2.0
"""Standard deviations by which more ends may be missing than expected."""


class PlaceLags:
    """Keeps `lag_s` of the requests that have places."""

    def __init__(self) -> None:
        self._placed: dict[RequestState, None] = {}
        self._freed_s: deque[float] = deque()  # lags of places that nobody has taken yet
        self._ends_s: deque[float] = deque(maxlen=_RECENT)

    def place(self, requests: Iterable[RequestState], now_s: float, *, any_waits: bool) -> None:
        """Record which requests have places, and hand on the lags of those that became free. No request is
        behind by more than it has waited. `any_waits`: whether others wait for a place."""
        before, self._placed = self._placed, dict.fromkeys(requests)
        for each in before:
            if each not in self._placed:
                self._freed_s.append(each.lag_s)
                self._ends_s.append(now_s)
        for each in self._placed:
            if each not in before:
                waited_s = now_s - each.arrived_s
                lag_s = self._freed_s.popleft() if self._freed_s else 0.0
                each.lag_s = min(max(lag_s, 0.0), waited_s)
        if not any_waits:
            self._freed_s.clear()  # these places would be free by now in any case

    def latest_s(
        self, paused: Collection[RequestState], takes_s: float, gains_s: float, now_s: float
    ) -> float:
        """Return by how much the next places may become free later, if these requests pause for a step of
        `takes_s` seconds by which the others gain `gains_s`."""
        pauses = set(paused)
        lags_s = [each.lag_s + (takes_s if each in pauses else -gains_s) for each in self._placed]
        most_s = max(lags_s)
        if len(self._ends_s) < _RECENT:
            return most_s
        gap_s = (now_s - self._ends_s[0]) / _RECENT
        mean_s = sum(lags_s) / len(lags_s)
        mean_size_s = sum(map(abs, lags_s)) / len(lags_s)
        return min(most_s, mean_s + _CAUTION * math.sqrt(gap_s * mean_size_s))
