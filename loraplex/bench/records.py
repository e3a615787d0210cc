"""The record that a benchmark keeps of each request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """The outcome of one request; times are seconds on the load generator's clock.

    `token_times_s` has one entry per streamed chunk. `finish_s` is the last of them; for a failed
    request, the time of the failure.
    """

    model: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    token_times_s: tuple[float, ...]
    finish_s: float
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None
