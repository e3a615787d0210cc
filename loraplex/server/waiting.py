"""The bound on what waits: a request beyond it is refused at once, with the time to come back.

Each choice of a call counts as a request from before its prompt is encoded until its first token, with the
tokens of its prompt as soon as these are known. Without a bound, a burst is queued for longer than any client
waits, and takes any amount of memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.errors import InvalidRequestError
from loraplex.server.errors import QueueFullError

_RATE_WINDOW: Final = 64
"""First tokens from which the rate of progress is computed."""
_MAX_RETRY_AFTER_S: Final = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingLimits:
    max_requests: int = 4096
    max_tokens: int = 4 * 2**20


class WaitingBook:
    """Counts requests that wait for their first token, and their prompt tokens."""

    def __init__(self, limits: WaitingLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._starts_s: deque[float] = deque(maxlen=_RATE_WINDOW)  # on the clock of `_waited_s`
        self._idle_since_s: float | None = clock.now_s()  # None while somebody waits
        self._idle_s = 0.0  # in all, up to `_idle_since_s`
        self.num_requests = 0
        self.num_tokens = 0
        self.num_refused = 0
        """Calls that were refused because the queue was full."""

    def admit(self, num_requests: int, *, param: str = "prompt") -> WaitingTicket:
        """Count a call's requests (prompts × n) from now on, before work is done on their prompts.

        Raises QueueFullError if there is no room now, and InvalidRequestError that blames `param` if there
        never is.
        """
        self._check(num_requests, num_tokens=0, param=param)
        if self._idle_since_s is not None:
            self._idle_s += self._clock.now_s() - self._idle_since_s
            self._idle_since_s = None
        self.num_requests += num_requests
        return WaitingTicket(self, num_requests)

    def add_tokens(self, num_tokens: int) -> None:
        """Count the prompt tokens of requests that were admitted; raises as `admit` does."""
        self._check(0, num_tokens)
        self.num_tokens += num_tokens

    def leave(self, num_tokens: int, *, started: bool) -> None:
        """One request waits no longer; `started`: because its first token came."""
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        if started:
            self._starts_s.append(self._waited_s())
        if self.num_requests == 0:
            self._idle_since_s = self._clock.now_s()

    def _check(self, num_requests: int, num_tokens: int, *, param: str = "prompt") -> None:
        limits = self._limits
        for count, waiting, limit, kind, option in (
            (num_requests, self.num_requests, limits.max_requests, "requests", "--max-waiting"),
            (num_tokens, self.num_tokens, limits.max_tokens, "prompt tokens", "--max-waiting-tokens"),
        ):
            if count > limit:
                raise InvalidRequestError(
                    f"this call alone makes {count:,} {kind} (prompts × n), more than the {limit:,} that may "
                    f"wait on this server; send it in parts, or start the server with a larger {option}",
                    param=param,
                )
            if waiting + count > limit:
                self.num_refused += 1
                retry_after_s = self._retry_after_s()
                raise QueueFullError(
                    f"the server's queue is full: {waiting:,} {kind} wait and at most {limit:,} may; "
                    f"try again in {retry_after_s} s",
                    kind="tokens" if kind == "prompt tokens" else "requests",
                    retry_after_s=retry_after_s,
                )

    def _retry_after_s(self) -> int:
        """Seconds until half of those that wait will have started, at the pace of the last ones."""
        if len(self._starts_s) < 2:
            return 1
        span_s = self._waited_s() - self._starts_s[0]
        wait_s = span_s / len(self._starts_s) * self.num_requests / 2
        return min(max(math.ceil(round(wait_s, 3)), 1), _MAX_RETRY_AFTER_S)

    def _waited_s(self) -> float:
        """A clock that stands still while nobody waits: a quiet hour says nothing of the pace of starts."""
        now_s = self._clock.now_s() if self._idle_since_s is None else self._idle_since_s
        return now_s - self._idle_s


class WaitingTicket:
    """One call's requests in the book."""

    def __init__(self, book: WaitingBook, num_requests: int) -> None:
        self._book = book
        self._num_tokens = dict.fromkeys(range(num_requests), 0)  # by choice, of those that wait

    def encoded(self, prompts: Sequence[Sequence[int]], num_siblings: int) -> None:
        """Count the tokens of the prompts, `num_siblings` times each; raises as `WaitingBook.admit` does."""
        lens = [len(prompt) for prompt in prompts for _ in range(num_siblings)]
        assert len(lens) == len(self._num_tokens), "the requests that were admitted"
        self._book.add_tokens(sum(lens))
        self._num_tokens = dict(enumerate(lens))

    def started(self, choice: int) -> None:
        """The first token of a choice came. May be called for each of its tokens."""
        if self._num_tokens and (num_tokens := self._num_tokens.pop(choice, None)) is not None:
            self._book.leave(num_tokens, started=True)

    def close(self) -> None:
        """The call is over, however it ended. Idempotent."""
        for num_tokens in self._num_tokens.values():
            self._book.leave(num_tokens, started=False)
        self._num_tokens.clear()
