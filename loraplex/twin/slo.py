"""The service level objective of requests: how long they may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """The most seconds per token, from arrival to the last token, and to the first token; None: no limit.
    Without any limit, every request that is served attains it."""

    tpt_s: float | None = None
    ttft_s: float | None = None

    def is_attained(self, *, tpt_s: float | None, ttft_s: float | None) -> bool:
        """Tell whether a request with these times attains it; None: it was not served."""
        if tpt_s is None or ttft_s is None:
            return False
        return (self.tpt_s is None or tpt_s <= self.tpt_s) and (self.ttft_s is None or ttft_s <= self.ttft_s)

    def in_words(self) -> str:
        """Return what follows "99% of requests": within 30.1 ms per token and 10 s to the first token."""
        limits = []
        if self.tpt_s is not None:
            limits.append(f"{self.tpt_s * 1e3:.1f} ms per token")
        if self.ttft_s is not None:
            first = f"{self.ttft_s:g} s" if self.ttft_s >= 1 else f"{self.ttft_s * 1e3:g} ms"
            limits.append(f"{first} to the first token")
        return f"within {' and '.join(limits)}" if limits else "served"


NO_SLO: Final = Slo()
