"""Decide when a crashed engine is restarted, and when to give up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from loraplex.core.clock import Clock


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Limits on restarting.

    `max_crashes` within `window_s` seconds means that the engine cannot sustain its load. A model that takes
    a minute to load would never crash that often, hence the separate limit `max_failed_starts` in a row.
    """

    first_delay_s: float = 0.25
    max_delay_s: float = 10.0
    max_crashes: int = 5
    window_s: float = 60.0
    max_failed_starts: int = 5


class CrashHistory:
    """Decides on restarts from the crashes so far."""

    def __init__(self, policy: RestartPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._crashes_s: deque[float] = deque()
        self._num_failed_starts = 0

    def started(self) -> None:
        """Record that the engine became ready."""
        self._num_failed_starts = 0

    def crashed(self, *, while_starting: bool) -> float | None:
        """Record a crash; return the seconds to wait before the next start, or None to give up."""
        policy, now_s = self._policy, self._clock.now_s()
        self._crashes_s.append(now_s)
        while self._crashes_s[0] <= now_s - policy.window_s:
            self._crashes_s.popleft()
        if while_starting:
            self._num_failed_starts += 1
        if len(self._crashes_s) >= policy.max_crashes or self._num_failed_starts >= policy.max_failed_starts:
            return None
        num_recent = max(len(self._crashes_s), self._num_failed_starts)
        return min(policy.max_delay_s, policy.first_delay_s * 2.0 ** (num_recent - 1))
