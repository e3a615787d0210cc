"""The use of one tenant, against its limits.

    admit ──▶ Spending ── encoded ── generated, generated, ... ──▶ close
              a request   the prompt  tokens as they come           what was expected in vain is given back

A request takes part in three counts: requests in the last minute, tokens in the last minute, and choices in
flight. With its prompt, the tokens are counted that its answer is *expected* to have, by the latest answers
of this tenant; those beyond are counted as they come, and those that did not come are given back. A request
is admitted while any tokens are left; an answer in progress is never cut.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.errors import InvalidRequestError
from loraplex.server.errors import QuotaError
from loraplex.server.rate_limits import Header, RateLimit, rate_limit_headers
from loraplex.server.tenants.minute_window import MinuteWindow
from loraplex.server.tenants.objective import Reached

_EXPECTED_AT_FIRST: Final = 256
_WEIGHT_OF_LATEST: Final = 1 / 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """A tenant's limits; None for none. Requests are HTTP requests; `max_in_flight` counts choices."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_in_flight: int | None = None


class OverQuota(StrEnum):
    """The limit for which a request was refused."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    IN_FLIGHT = "in_flight"


class Account:
    """The use of one tenant since the start. `num_refused`: requests refused with 429 for a limit;
    `num_reached`: requests with an objective, by target and whether they reached it."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._clock = clock
        self._requests = MinuteWindow(limits.requests_per_minute)
        self._tokens = MinuteWindow(limits.tokens_per_minute)
        self._expected = float(_EXPECTED_AT_FIRST)
        self.num_in_flight = 0
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_refused: Counter[OverQuota] = Counter()
        self.num_reached: Counter[Reached] = Counter()
        self.limits = limits

    def change(self, limits: Limits) -> None:
        """Set the limits; what was used stays used, also without a limit."""
        self.limits = limits
        self._requests.limit = limits.requests_per_minute
        self._tokens.limit = limits.tokens_per_minute

    def admit(self, num_choices: int, *, param: str = "prompt") -> Spending:
        """Count a request with this number of prompts × n, 0 for one that generates nothing. Raises
        QuotaError at a limit, and InvalidRequestError, about `param`, for a request that will never be
        within it."""
        self._check_in_flight(num_choices, param)
        now_s = self._clock.now_s()
        self._check_requests(now_s)
        if num_choices:
            self._check_tokens(now_s)
        self._requests.use(1, now_s)
        self.num_requests += 1
        self.num_in_flight += num_choices
        return Spending(self, num_choices)

    def headers(self) -> list[Header]:
        """Return the headers about the limits per minute, as they are now."""
        now_s = self._clock.now_s()
        windows = (("requests", self._requests), ("tokens", self._tokens))
        return rate_limit_headers(
            RateLimit(kind, window.limit, window.room(now_s), window.reset_s(now_s))
            for kind, window in windows
            if window.limit is not None
        )

    @property
    def requests_left(self) -> int | None:
        """Requests that may be made now; None without a limit."""
        return self._left_of(self._requests)

    @property
    def tokens_left(self) -> int | None:
        """Tokens that are left of this minute's; None without a limit."""
        return self._left_of(self._tokens)

    def check_prompt(self, num_tokens: int, param: str) -> None:
        """Raise for prompts that never fit a minute, or that come when no tokens are left."""
        limit = self.limits.tokens_per_minute
        if limit is not None and num_tokens > limit:
            raise InvalidRequestError(
                f"this request has {num_tokens:,} prompt tokens, more than the {limit:,} tokens "
                "per minute of this key's tenant; shorten it, or send it in parts",
                param=param,
            )
        self._check_tokens(self._clock.now_s())

    def expected(self, num_choices: int, max_tokens: int) -> int:
        """Return the number of tokens that choices will probably generate."""
        return num_choices * min(max_tokens, math.ceil(self._expected))

    def use_tokens(self, num_tokens: int) -> None:
        """Count tokens of this minute; below 0 to give them back."""
        if num_tokens >= 0:
            self._tokens.use(num_tokens, self._clock.now_s())
        else:
            self._tokens.give_back(-num_tokens, self._clock.now_s())

    def learn(self, tokens_of_a_choice: float) -> None:
        """Correct what is expected of answers by one that is complete."""
        self._expected += _WEIGHT_OF_LATEST * (tokens_of_a_choice - self._expected)

    def uncount(self) -> None:
        """Undo a request that was refused after it was admitted, or that the server failed to answer."""
        self.num_requests -= 1
        self._requests.give_back(1, self._clock.now_s())

    def _left_of(self, window: MinuteWindow) -> int | None:
        return None if window.limit is None else max(window.room(self._clock.now_s()), 0)

    def _check_in_flight(self, num_choices: int, param: str) -> None:
        limit = self.limits.max_in_flight
        if limit is None or self.num_in_flight + num_choices <= limit:
            return
        if num_choices > limit:
            raise InvalidRequestError(
                f"this request asks for {num_choices:,} choices (prompts × n), more than the {limit:,} that "
                "this key's tenant may have in flight; send it in parts",
                param=param,
            )
        self._refuse(OverQuota.IN_FLIGHT, f"{limit:,} choices in flight at a time", 1.0)

    def _check_requests(self, now_s: float) -> None:
        window = self._requests
        if window.limit is not None and window.room(now_s) < 1:
            self._refuse(OverQuota.REQUESTS, f"{window.limit:,} requests per minute", window.wait_s(1, now_s))

    def _check_tokens(self, now_s: float) -> None:
        window = self._tokens
        if window.limit is not None and window.room(now_s) < 1:
            self._refuse(OverQuota.TOKENS, f"{window.limit:,} tokens per minute", window.wait_s(1, now_s))

    def _refuse(self, reason: OverQuota, limit: str, wait_s: float) -> None:
        self.num_refused[reason] += 1
        retry_after_s = max(math.ceil(round(wait_s, 3)), 1)
        raise QuotaError(
            f"this key's tenant has reached its limit of {limit}; try again in {retry_after_s} s",
            kind="tokens" if reason is OverQuota.TOKENS else "requests",
            retry_after_s=retry_after_s,
        )


class Spending:
    """The use of one request."""

    def __init__(self, account: Account, num_choices: int) -> None:
        self._account = account
        self._num_choices = num_choices
        self._num_prompt_tokens = 0
        self._num_generated = 0
        self._expected = 0
        self._is_open = True

    def encoded(self, num_prompt_tokens: int, max_tokens: int, *, param: str = "prompt") -> None:
        """Count the tokens of the prompts. `max_tokens`: of each choice. Raises as `Account.admit` does."""
        account = self._account
        account.check_prompt(num_prompt_tokens, param)
        self._expected = account.expected(self._num_choices, max_tokens)
        account.use_tokens(num_prompt_tokens + self._expected)
        account.num_prompt_tokens += num_prompt_tokens
        self._num_prompt_tokens = num_prompt_tokens

    def generated(self, num_tokens: int) -> None:
        """Count tokens that were generated."""
        was_expected = min(num_tokens, self._expected)
        self._expected -= was_expected
        self._num_generated += num_tokens
        self._account.num_generated_tokens += num_tokens
        self._account.use_tokens(num_tokens - was_expected)

    def close(self, *, is_complete: bool = False, is_refused: bool = False) -> None:
        """End the request. `is_complete`: its answer is. `is_refused`: it was refused, or the server failed;
        it does not count then, unless it has got tokens. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        account = self._account
        account.num_in_flight -= self._num_choices
        account.use_tokens(-self._expected)
        if is_complete:
            account.learn(self._num_generated / self._num_choices)
        elif is_refused and self._num_generated == 0:
            account.uncount()
            account.use_tokens(-self._num_prompt_tokens)
            account.num_prompt_tokens -= self._num_prompt_tokens
