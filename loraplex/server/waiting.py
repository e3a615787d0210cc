"""The limits on waiting requests: a request beyond them is refused at once, with the time to retry after.

Each choice of a call counts as a request from before its prompt is encoded until its first token, and its
prompt tokens count as soon as they are known. Without a limit, a burst would be queued for longer than any
client waits, and could take any amount of memory. If the time to the first token is limited as well, it is
predicted twice: before the prompt is encoded, as if it were short, so that an overloaded server does not even
encode what it refuses; and again with its tokens, before the engine gets the request.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from loraplex.core.clock import Clock
from loraplex.core.errors import InvalidRequestError
from loraplex.core.tenants import NO_TENANT, NOBODY, Caller, TenantPolicy
from loraplex.fleet.admission import Admitted, Forecast
from loraplex.fleet.waiting_room import WaitingRoom
from loraplex.server.errors import QueueFullError
from loraplex.server.rate_limits import Header, RateLimit, rate_limit_headers

_RATE_WINDOW: Final = 64
"""Number of latest first tokens from which the rate of starts is computed."""
_MAX_RETRY_AFTER_S: Final = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingLimits:
    """Limits on waiting requests. `max_ttft_s`: longest predicted time to first token in seconds; None for no
    limit. `max_borrowing`: that of the engines, which predictions depend on."""

    max_requests: int = 4096
    max_tokens: int = 4 * 2**20
    max_ttft_s: float | None = None
    max_borrowing: float | None = None


class Refused(StrEnum):
    """The reason why a call was refused."""

    QUEUE_FULL = "queue_full"
    TTFT = "ttft"
    SLO = "slo"


class Forecaster(Protocol):
    """An engine that predicts when a request would get its first token."""

    def forecast(self, adapter: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast | None:
        """Return the prediction for a request sent now; None if none can be made. `adapter`: a version.
        `admitted`: all requests that wait for their first token, sent or not."""
        ...


class WaitingBook:
    """Counts requests that wait for their first token, and their prompt tokens."""

    def __init__(self, limits: WaitingLimits, clock: Clock, forecaster: Forecaster | None = None) -> None:
        """`forecaster`: used if the time to a request's first token, or for each later one, is limited."""
        self._limits = limits
        self._clock = clock
        self._forecaster = forecaster
        self.room = WaitingRoom(limits.max_requests, limits.max_ttft_s, limits.max_borrowing)
        self._starts_s: deque[float] = deque(maxlen=_RATE_WINDOW)  # on the clock of `_waited_s`
        self._idle_since_s: float | None = clock.now_s()  # None while any request waits
        self._idle_s = 0.0  # total, up to `_idle_since_s`
        self.num_refused: Counter[Refused] = Counter()
        """Number of refused calls, by reason."""
        self._num_refused_of: Counter[tuple[str, Refused]] = Counter()
        self.on_leave: Callable[[], None] = _nothing
        """Called when a request waits no longer."""

    @property
    def num_requests(self) -> int:
        return self.room.num_requests

    @property
    def max_requests(self) -> int:
        return self._limits.max_requests

    @property
    def num_tokens(self) -> int:
        return self.room.num_tokens

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """Replace the shares, priorities and objectives of tenants."""
        self.room.set_policies(policies)

    def admit(
        self,
        num_requests: int,
        *,
        adapter: str | None = None,
        param: str = "prompt",
        was_admitted: bool = False,
        caller: Caller = NOBODY,
    ) -> WaitingTicket:
        """Count a call's requests (prompts × n) from now on, before their prompts are processed.

        Raises QueueFullError if there is no room now, and InvalidRequestError that blames `param` if there
        never will be. `adapter`: the version that is requested. `was_admitted`: the requests were admitted
        before, by another server that cannot continue them, and are never refused. `caller`: whose they are.
        """
        self.room.observe(self._clock.now_s())
        if not was_admitted:
            self._check(num_requests, num_tokens=0, param=param, caller=caller)
            self._forecast(adapter, [1], caller)
        if self._idle_since_s is not None:
            self._idle_s += self._clock.now_s() - self._idle_since_s
            self._idle_since_s = None
        self.room.enter(caller, num_requests)
        return WaitingTicket(
            self, num_requests, adapter, self._clock.now_s(), is_bounded=not was_admitted, caller=caller
        )

    def add_tokens(
        self,
        lens: Sequence[int],
        adapter: str | None,
        *,
        admitted_s: float,
        is_bounded: bool,
        caller: Caller,
    ) -> Forecast | None:
        """Count the prompt tokens of requests that were admitted at `admitted_s`; raises as `admit` does if
        `is_bounded`. Return the prediction for them."""
        predicted = None
        if is_bounded:
            self._check(0, sum(lens), caller=caller)
            waited_s = self._clock.now_s() - admitted_s
            predicted = self._forecast(adapter, lens, caller, waited_s=waited_s)
        self.room.encoded(caller, lens)
        return predicted

    def leave(self, caller: Caller, num_tokens: int | None, *, started: bool) -> None:
        """Record that one request waits no longer. `started`: its first token came. `num_tokens`: of its
        prompt; None if it was not encoded."""
        self.room.pass_time(self._clock.now_s())
        if started:
            self.room.began(caller, num_tokens)
        else:
            self.room.leave(caller, num_tokens)
        if started:
            self._starts_s.append(self._waited_s())
        if self.num_requests == 0:
            self._idle_since_s = self._clock.now_s()
        self.on_leave()

    def num_refused_of(self, tenant: str) -> Mapping[Refused, int]:
        """Return the number of a tenant's refused calls, by reason."""
        return {reason: self._num_refused_of[tenant, reason] for reason in Refused}

    def _count_refused(self, reason: Refused, caller: Caller) -> None:
        self.num_refused[reason] += 1
        self._num_refused_of[caller.tenant, reason] += 1

    def _check(
        self, num_requests: int, num_tokens: int, *, param: str = "prompt", caller: Caller = NOBODY
    ) -> None:
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
            is_full = waiting + count > limit
            if is_full or (num_requests and not self.room.has_place_for(caller.tenant, num_requests)):
                self._count_refused(Refused.QUEUE_FULL, caller)
                retry_after_s = self._retry_after_s()
                full = f"at most {limit:,} {kind} may wait"
                if not is_full:
                    full += ", and the places left are kept for other tenants"
                elif caller.tenant == NO_TENANT:
                    full = f"{waiting:,} {kind} wait and at most {limit:,} may"
                raise QueueFullError(
                    f"the server's queue is full: {full}; try again in {retry_after_s} s",
                    kind="tokens" if kind == "prompt tokens" else "requests",
                    retry_after_s=retry_after_s,
                )

    def _forecast(
        self, adapter: str | None, lens: Sequence[int], caller: Caller, *, waited_s: float = 0.0
    ) -> Forecast | None:
        """Predict the first token of the last of these requests of a call. Raises QueueFullError if it would
        come too late."""
        if self._forecaster is None or not self.room.is_limited(caller):
            return None
        *others, last = lens
        admitted = self.room.before(caller, len(others), sum(others), last)
        predicted = self._forecaster.forecast(adapter, last, admitted)
        verdict = None if predicted is None else self.room.judge(predicted, caller, waited_s)
        if verdict is None or verdict.retry_after_s is None:
            return predicted
        self._count_refused(Refused.SLO if verdict.is_slo else Refused.TTFT, caller)
        seconds = _whole_seconds(verdict.retry_after_s)
        limit = f"its objective is {verdict.limit_s:g} s"
        if not verdict.is_slo:
            limit = f"at most {verdict.limit_s:g} s are allowed here (--max-ttft)"
        what = (
            "each token after the first would take" if verdict.is_pace else "the first token would come after"
        )
        raise QueueFullError(
            f"the server has too much to do: {what} about {verdict.seconds:.2g} s, and {limit}; try again in "
            f"{seconds} s",
            kind="requests",
            retry_after_s=seconds,
        )

    def came(self, predicted: Forecast, predicted_at_s: float, caller: Caller) -> None:
        """Record that the first token came for a request with this prediction, made at `predicted_at_s`."""
        self.room.came(predicted, self._clock.now_s() - predicted_at_s, caller)

    def ended(self, caller: Caller, predicted: Forecast | None, tpt_s: float | None) -> None:
        """Record that a request which had started has ended. `tpt_s`: seconds for each token of its answer
        after the first; None if that says nothing."""
        self.room.pass_time(self._clock.now_s())
        self.room.ended(caller)
        if predicted is not None and tpt_s is not None:
            self.room.paced(predicted, tpt_s, caller)

    def now_s(self) -> float:
        return self._clock.now_s()

    def headers(self) -> list[Header]:
        """Return the headers about the room that is left."""
        limits = self._limits
        drain_s = float(_whole_seconds(self._drain_s())) if self.num_requests else 0.0
        return rate_limit_headers(
            [
                RateLimit("requests", limits.max_requests, limits.max_requests - self.num_requests, drain_s),
                RateLimit("tokens", limits.max_tokens, limits.max_tokens - self.num_tokens, drain_s),
            ]
        )

    def _retry_after_s(self) -> int:
        """Return the seconds until half of the waiting requests will have started, at the latest pace."""
        return _whole_seconds(self._drain_s() / 2)

    def _drain_s(self) -> float:
        """Return the seconds until all of the waiting requests will have started, at the latest pace."""
        if len(self._starts_s) < 2:
            return 0.0
        span_s = self._waited_s() - self._starts_s[0]
        return span_s / len(self._starts_s) * self.num_requests

    def _waited_s(self) -> float:
        """Return the time on a clock that stops while nothing waits: idle time says nothing about the pace of
        starts."""
        now_s = self._clock.now_s() if self._idle_since_s is None else self._idle_since_s
        return now_s - self._idle_s


class WaitingTicket:
    """The waiting requests of one call."""

    def __init__(
        self,
        book: WaitingBook,
        num_requests: int,
        adapter: str | None,
        admitted_s: float,
        *,
        is_bounded: bool,
        caller: Caller,
    ) -> None:
        self._book = book
        self._caller = caller
        self._adapter = adapter
        self._admitted_s = admitted_s
        self._is_bounded = is_bounded
        # Prompt tokens of the waiting choices, by choice; None before the prompts are encoded.
        self._num_tokens: dict[int, int | None] = dict.fromkeys(range(num_requests))
        # Set for calls with a single choice, since the prediction is about one first token.
        self._predicted: tuple[Forecast, float] | None = None
        self._num_running = 0

    def encoded(self, prompts: Sequence[Sequence[int]], num_siblings: int) -> None:
        """Count the tokens of the prompts, `num_siblings` times each; raises as `WaitingBook.admit` does."""
        lens = [len(prompt) for prompt in prompts for _ in range(num_siblings)]
        assert len(lens) == len(self._num_tokens), "the requests that were admitted"
        predicted = self._book.add_tokens(
            lens,
            self._adapter,
            admitted_s=self._admitted_s,
            is_bounded=self._is_bounded,
            caller=self._caller,
        )
        self._num_tokens = dict(enumerate(lens))
        if predicted is not None and len(lens) == 1:
            self._predicted = predicted, self._book.now_s()

    def started(self, choice: int) -> None:
        """Record that a choice has its first token. May be called for each of its tokens."""
        if choice in self._num_tokens:
            self._book.leave(self._caller, self._num_tokens.pop(choice), started=True)
            self._num_running += 1
            if self._predicted is not None:
                self._book.came(*self._predicted, self._caller)

    @property
    def waits(self) -> bool:
        """Return whether any choice waits for its first token."""
        return bool(self._num_tokens)

    def close(self, tpt_s: float | None = None) -> None:
        """Record that the call is over, however it ended. Idempotent. `tpt_s`: see `WaitingBook.ended`."""
        for num_tokens in self._num_tokens.values():
            self._book.leave(self._caller, num_tokens, started=False)
        self._num_tokens.clear()
        for _ in range(self._num_running):
            self._book.ended(self._caller, None if self._predicted is None else self._predicted[0], tpt_s)
        self._num_running = 0


def _nothing() -> None:
    pass


def _whole_seconds(seconds: float) -> int:
    return min(max(math.ceil(round(seconds, 3)), 1), _MAX_RETRY_AFTER_S)
