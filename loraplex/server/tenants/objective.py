"""Count how many requests reach their objectives: those of their adapter, or else of their tenant.

They are counted twice, by tenant and by adapter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class Target(StrEnum):
    """A time that an objective limits: to the first token, and for each later one."""

    TTFT = "ttft"
    TPT = "tpt"


class Reached(NamedTuple):
    """A target, and whether a request reached it."""

    target: Target
    is_attained: bool


class Objective(NamedTuple):
    """The targets of one request, in seconds; None for none. `counts`: the counters that it belongs to."""

    ttft_s: float | None
    tpt_s: float | None
    counts: tuple[Counter[Reached], ...]

    def counted_in(self, counter: Counter[Reached]) -> Objective:
        """Return the same targets, of a request that belongs to this counter as well."""
        return self._replace(counts=(*self.counts, counter))

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token; infinity if there was none."""
        self._count(Target.TTFT, self.ttft_s, seconds)

    def later_tokens(self, seconds_each: float) -> None:
        """Record the mean time of the tokens after the first, of a request that was answered."""
        self._count(Target.TPT, self.tpt_s, seconds_each)

    def _count(self, target: Target, limit_s: float | None, seconds: float) -> None:
        if limit_s is not None:
            for counter in self.counts:
                counter[Reached(target, seconds <= limit_s)] += 1


def attainment(counter: Counter[Reached]) -> Iterator[tuple[Target, str, int]]:
    """Yield every target and result, in the words of /metrics, and the number of requests with them."""
    for target in Target:
        for result, is_attained in (("attained", True), ("missed", False)):
            yield target, result, counter[Reached(target, is_attained)]
