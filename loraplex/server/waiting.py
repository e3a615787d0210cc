"""The bounds on what waits: a request beyond them is refused at once, with the time to come back.

Each choice of a call counts as a request from before its prompt is encoded until its first token, with the
tokens of its prompt as soon as these are known. Without a bound, a burst is queued for longer than any client
waits, and takes any amount of memory. Where the time to the first token is bounded as well, it is predicted
twice: before the prompt is encoded, as if that were short, so that a server with too much to do does not
even encode what it refuses; and with its tokens, before the engine hears of it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from loraplex.core.clock import Clock
from loraplex.core.errors import InvalidRequestError
from loraplex.fleet.admission import Admission, Admitted, Forecast
from loraplex.server.errors import QueueFullError

_RATE_WINDOW: Final = 64
"""First tokens from which the rate of progress is computed."""
_MAX_RETRY_AFTER_S: Final = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingLimits:
    """`max_ttft_s`: the longest that a request may be predicted to wait for its first token; None for any."""

    max_requests: int = 4096
    max_tokens: int = 4 * 2**20
    max_ttft_s: float | None = None


class Refused(StrEnum):
    """Why a call was refused."""

    QUEUE_FULL = "queue_full"
    TTFT = "ttft"


class Forecaster(Protocol):
    """An engine that predicts when a request would have its first token."""

    def forecast(self, adapter: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast | None:
        """Return what is predicted of a request that would be sent now; None while nothing can be said.
        `adapter`: a version. `admitted`: all that wait for their first token, sent or not."""
        ...


class WaitingBook:
    """Counts requests that wait for their first token, and their prompt tokens."""

    def __init__(self, limits: WaitingLimits, clock: Clock, forecaster: Forecaster | None = None) -> None:
        """`forecaster`: asked where the time to the first token is bounded."""
        self._limits = limits
        self._clock = clock
        self._forecaster = forecaster
        self.admission = None if limits.max_ttft_s is None else Admission(limits.max_ttft_s)
        self._starts_s: deque[float] = deque(maxlen=_RATE_WINDOW)  # on the clock of `_waited_s`
        self._idle_since_s: float | None = clock.now_s()  # None while somebody waits
        self._idle_s = 0.0  # in all, up to `_idle_since_s`
        self.num_requests = 0
        self.num_tokens = 0
        self._num_encoded = 0  # of the requests
        self.num_refused: Counter[Refused] = Counter()
        """Calls that were refused, by reason."""

    def admit(
        self,
        num_requests: int,
        *,
        adapter: str | None = None,
        param: str = "prompt",
        was_admitted: bool = False,
    ) -> WaitingTicket:
        """Count a call's requests (prompts × n) from now on, before work is done on their prompts.

        Raises QueueFullError if there is no room now, and InvalidRequestError that blames `param` if there
        never is. `adapter`: the version that is asked for. `was_admitted`: the requests were let in before,
        by another server which cannot go on with them, and are never refused.
        """
        if not was_admitted:
            self._check(num_requests, num_tokens=0, param=param)
            self._forecast(adapter, [1])
        if self._idle_since_s is not None:
            self._idle_s += self._clock.now_s() - self._idle_since_s
            self._idle_since_s = None
        self.num_requests += num_requests
        return WaitingTicket(self, num_requests, adapter, self._clock.now_s(), is_bounded=not was_admitted)

    def add_tokens(
        self, lens: Sequence[int], adapter: str | None, *, admitted_s: float, is_bounded: bool
    ) -> Forecast | None:
        """Count the prompt tokens of requests that were admitted then; raises as `admit` does, unless they
        are not bounded. Return what is predicted of them."""
        predicted = None
        if is_bounded:
            self._check(0, sum(lens))
            predicted = self._forecast(adapter, lens, waited_s=self._clock.now_s() - admitted_s)
        self.num_tokens += sum(lens)
        self._num_encoded += len(lens)
        return predicted

    def leave(self, num_tokens: int | None, *, started: bool) -> None:
        """One request waits no longer; `started`: because its first token came. `num_tokens`: of its prompt,
        None if that was not encoded."""
        self.num_requests -= 1
        if num_tokens is not None:
            self.num_tokens -= num_tokens
            self._num_encoded -= 1
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
                self.num_refused[Refused.QUEUE_FULL] += 1
                retry_after_s = self._retry_after_s()
                raise QueueFullError(
                    f"the server's queue is full: {waiting:,} {kind} wait and at most {limit:,} may; "
                    f"try again in {retry_after_s} s",
                    kind="tokens" if kind == "prompt tokens" else "requests",
                    retry_after_s=retry_after_s,
                )

    def _forecast(
        self, adapter: str | None, lens: Sequence[int], *, waited_s: float = 0.0
    ) -> Forecast | None:
        """Predict the first token of the last of these requests of a call; raises QueueFullError if that is
        too far away."""
        if self.admission is None or self._forecaster is None:
            return None
        *others, last = lens
        admitted = Admitted(self._num_encoded + len(others), self.num_tokens + sum(others))
        predicted = self._forecaster.forecast(adapter, last, admitted)
        if predicted is None:
            return None
        retry_after_s = self.admission.retry_after_s(predicted, waited_s)
        if retry_after_s is None:
            return predicted
        self.num_refused[Refused.TTFT] += 1
        seconds = _whole_seconds(retry_after_s)
        ttft_s = waited_s + self.admission.correction * predicted.ttft_s
        raise QueueFullError(
            f"the server has too much to do: the first token would come after about {ttft_s:.2g} s, and at "
            f"most {self.admission.max_ttft_s:g} s are allowed here (--max-ttft); try again in {seconds} s",
            kind="requests",
            retry_after_s=seconds,
        )

    def came(self, predicted: Forecast, predicted_at_s: float) -> None:
        """The first token came of a request of which this was predicted then."""
        if self.admission is not None:
            self.admission.observe(predicted.ttft_s, self._clock.now_s() - predicted_at_s)

    def now_s(self) -> float:
        return self._clock.now_s()

    def _retry_after_s(self) -> int:
        """Seconds until half of those that wait will have started, at the pace of the last ones."""
        if len(self._starts_s) < 2:
            return 1
        span_s = self._waited_s() - self._starts_s[0]
        wait_s = span_s / len(self._starts_s) * self.num_requests / 2
        return _whole_seconds(wait_s)

    def _waited_s(self) -> float:
        """A clock that stands still while nobody waits: a quiet hour says nothing of the pace of starts."""
        now_s = self._clock.now_s() if self._idle_since_s is None else self._idle_since_s
        return now_s - self._idle_s


class WaitingTicket:
    """One call's requests in the book."""

    def __init__(
        self,
        book: WaitingBook,
        num_requests: int,
        adapter: str | None,
        admitted_s: float,
        *,
        is_bounded: bool,
    ) -> None:
        self._book = book
        self._adapter = adapter
        self._admitted_s = admitted_s
        self._is_bounded = is_bounded
        # By choice, of those that wait; None before their prompts are encoded.
        self._num_tokens: dict[int, int | None] = dict.fromkeys(range(num_requests))
        # Of a call with one choice, whose first token is the one that was predicted.
        self._predicted: tuple[Forecast, float] | None = None

    def encoded(self, prompts: Sequence[Sequence[int]], num_siblings: int) -> None:
        """Count the tokens of the prompts, `num_siblings` times each; raises as `WaitingBook.admit` does."""
        lens = [len(prompt) for prompt in prompts for _ in range(num_siblings)]
        assert len(lens) == len(self._num_tokens), "the requests that were admitted"
        predicted = self._book.add_tokens(
            lens, self._adapter, admitted_s=self._admitted_s, is_bounded=self._is_bounded
        )
        self._num_tokens = dict(enumerate(lens))
        if predicted is not None and len(lens) == 1:
            self._predicted = predicted, self._book.now_s()

    def started(self, choice: int) -> None:
        """The first token of a choice came. May be called for each of its tokens."""
        if choice in self._num_tokens:
            self._book.leave(self._num_tokens.pop(choice), started=True)
            if self._predicted is not None:
                self._book.came(*self._predicted)

    @property
    def waits(self) -> bool:
        """Tell whether any choice waits for its first token."""
        return bool(self._num_tokens)

    def close(self) -> None:
        """The call is over, however it ended. Idempotent."""
        for num_tokens in self._num_tokens.values():
            self._book.leave(num_tokens, started=False)
        self._num_tokens.clear()


def _whole_seconds(seconds: float) -> int:
    return min(max(math.ceil(round(seconds, 3)), 1), _MAX_RETRY_AFTER_S)
