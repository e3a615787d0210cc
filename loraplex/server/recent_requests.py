"""The requests of the last minutes as the engines received them, with what a twin needs to replay them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from loraplex.core.clock import Clock, MonotonicClock

_MAX_REQUESTS: Final = 8192
"""Number of ended requests that are kept, which take under a megabyte."""


@dataclass(kw_only=True, slots=True)
class RecentRequest:
    """One request at one replica; times are in seconds on the server's clock. `rank`: 0 for the base model.
    `num_cached`: prompt tokens found in the prefix cache. `first_s`, `last_s`: times of its first and last
    token so far; None while it has none. `ended`: no more tokens will come."""

    replica: int
    version: str | None
    rank: int
    prompt_tokens: int
    sent_s: float
    num_cached: int = 0
    num_output: int = 0
    first_s: float | None = None
    last_s: float | None = None
    ended: bool = False


class RecentRequests:
    """Records requests and their tokens. A bounded number of ended requests is kept."""

    def __init__(self, clock: Clock | None = None, max_requests: int = _MAX_REQUESTS) -> None:
        self._clock = clock or MonotonicClock()
        self._open: dict[int, RecentRequest] = {}  # by identity
        self._ended: deque[RecentRequest] = deque()
        self._max_requests = max_requests
        self.complete_since_s = self.now_s()
        """Time from which on all requests are known: those in flight then, and all later ones."""

    def now_s(self) -> float:
        return self._clock.now_s()

    def sent(self, replica: int, version: str | None, rank: int, prompt_tokens: int) -> RecentRequest:
        """Record a request that is sent now."""
        request = RecentRequest(
            replica=replica, version=version, rank=rank, prompt_tokens=prompt_tokens, sent_s=self.now_s()
        )
        self._open[id(request)] = request
        return request

    def tokens(self, request: RecentRequest, num_tokens: int) -> None:
        """Record tokens that arrive now."""
        request.last_s = self.now_s()
        if request.first_s is None:
            request.first_s = request.last_s
        request.num_output += num_tokens

    def ended(self, request: RecentRequest) -> None:
        del self._open[id(request)]
        request.ended = True
        self._ended.append(request)
        if len(self._ended) > self._max_requests:
            oldest = self._ended.popleft()
            self.complete_since_s = max(self.complete_since_s, oldest.last_s or oldest.sent_s)

    def since(self, since_s: float) -> list[RecentRequest]:
        """Return the requests that were in flight at this time or came later, in the order they were sent."""
        found = [each for each in self._ended if (each.last_s or each.sent_s) >= since_s]
        return sorted([*found, *self._open.values()], key=lambda each: each.sent_s)
