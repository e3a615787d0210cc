"""Counts how many requests of a tenant reach their objectives: the adapter's, or else the tenant's."""

from __future__ import annotations

from collections import Counter
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
    """The targets of one request, in seconds; None for none. `counts`: the tenant's."""

    ttft_s: float | None
    tpt_s: float | None
    counts: Counter[Reached]

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token; infinity if there was none."""
        self._count(Target.TTFT, self.ttft_s, seconds)

    def later_tokens(self, seconds_each: float) -> None:
        """Record the mean time of the tokens after the first, of a request that was answered."""
        self._count(Target.TPT, self.tpt_s, seconds_each)

    def _count(self, target: Target, limit_s: float | None, seconds: float) -> None:
        if limit_s is not None:
            self.counts[Reached(target, seconds <= limit_s)] += 1
