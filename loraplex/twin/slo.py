"""The service level objective: limits on the times of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol


class RequestTimes(Protocol):
    """The times of one request that an `Slo` limits, in seconds; None if there was no such token."""

    @property
    def is_served(self) -> bool: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def tpt_s(self) -> float | None: ...
    @property
    def tpot_s(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Limits in seconds: per token, from arrival to the last token (`tpt_s`); per token after the first
    (`tpot_s`); to the first token (`ttft_s`). None: no limit. Without any limit, every served request attains
    it."""

    tpt_s: float | None = None
    tpot_s: float | None = None
    ttft_s: float | None = None

    @property
    def token_s(self) -> float | None:
        """The stricter limit on seconds per token, which routers keep steps within."""
        return min((limit_s for limit_s in (self.tpt_s, self.tpot_s) if limit_s is not None), default=None)

    def is_attained(self, request: RequestTimes) -> bool:
        return (
            request.is_served
            and _is_within(request.tpt_s, self.tpt_s)
            and _is_within(request.tpot_s, self.tpot_s)
            and _is_within(request.ttft_s, self.ttft_s)
        )

    def in_words(self) -> str:
        """Return the text that follows "99% of requests", as in: within 30.1 ms per token and 10 s to the
        first token."""
        limits = []
        if self.tpt_s is not None:
            limits.append(f"{self.tpt_s * 1e3:.3g} ms per token")
        if self.tpot_s is not None:
            limits.append(f"{self.tpot_s * 1e3:.3g} ms per token after the first")
        if self.ttft_s is not None:
            first = f"{self.ttft_s:g} s" if self.ttft_s >= 1 else f"{self.ttft_s * 1e3:g} ms"
            limits.append(f"{first} to the first token")
        return f"within {' and '.join(limits)}" if limits else "served"


def _is_within(seconds: float | None, limit_s: float | None) -> bool:
    return limit_s is None or seconds is None or seconds <= limit_s


NO_SLO: Final = Slo()
