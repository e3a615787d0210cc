"""Limits that a plan has to attain on every GPU, besides that nobody starves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Limits on the means of a GPU: `ttft_s` over its requests, `itl_s` over the gaps between tokens of an
    answer. None: no limit. Whatever the limits, a GPU must serve 0.9 of the tokens that it is offered.

    Limits are on means, as these are what profiles of slot engines are validated on, and what a few thousand
    simulated requests determine well; tails are not."""

    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def has_limits(self) -> bool:
        return self.ttft_s is not None or self.itl_s is not None

    def missed(self, ttft_s: float | None, itl_s: float | None) -> tuple[str, ...]:
        """Return the limits that these means miss, in words. A GPU without requests misses none."""
        return tuple(
            f"mean {name} {in_ms(found_s)}, above {in_ms(limit_s)}"
            for name, found_s, limit_s in (("TTFT", ttft_s, self.ttft_s), ("ITL", itl_s, self.itl_s))
            if found_s is not None and limit_s is not None and found_s > limit_s
        )

    def words(self) -> Iterator[str]:
        """Yield each limit as people read it."""
        for name, limit_s in (("TTFT", self.ttft_s), ("ITL", self.itl_s)):
            if limit_s is not None:
                yield f"mean {name} at most {in_ms(limit_s)}"


NO_LIMITS: Final = Objective()


def in_ms(seconds: float) -> str:
    """Return milliseconds with three digits or more: 12.3 ms, 1,234 ms."""
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
