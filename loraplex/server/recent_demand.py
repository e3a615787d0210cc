"""The demand of the last half hour: requests by adapter, and their mean lengths, to plan from.

Counts are kept by minute, and a request costs a few additions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from loraplex.core.clock import Clock

_PERIOD_S: Final = 60.0
_NUM_PERIODS: Final = 30


@dataclass(kw_only=True, slots=True)
class _Counts:
    """The counts of one minute. `num_asked`: answers asked for, by adapter; `num_asked_of_all` includes those
    of adapters that are gone."""

    num_asked: Counter[str] = field(default_factory=Counter)
    num_asked_of_base: int = 0
    num_asked_of_all: int = 0
    num_prompt_tokens: int = 0
    num_answered: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDemand:
    """The demand of the last `seconds`. `num_asked`: answers asked for, by adapter; `num_asked_of_base`:
    those of the base model alone. `prompt_tokens` and `output_tokens`: means of requests for adapters; None
    if there were none, or if none was answered."""

    seconds: float
    num_asked: Counter[str]
    num_asked_of_base: int
    prompt_tokens: float | None
    output_tokens: float | None


class RecentDemand:
    """Counts requests as they arrive, and their answers when they have ended.

    A request for several answers counts as so many, each with its prompt: an engine gets one sequence for
    each, and as they begin in the same step, none finds the prompt in the prefix cache. Requests for the base
    model alone are counted apart, as plans are about adapters."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.now_s()
        self._counts: dict[int, _Counts] = {}  # by minute since the start, oldest first

    def arrived(self, adapter: str | None, *, num_choices: int, num_prompt_tokens: int) -> None:
        """Count a request that is accepted now. `adapter`: None for the base model. `num_prompt_tokens`: of
        the prompts of all choices."""
        counts = self._now()
        if adapter is None:
            counts.num_asked_of_base += num_choices
            return
        counts.num_asked[adapter] += num_choices
        counts.num_asked_of_all += num_choices
        counts.num_prompt_tokens += num_prompt_tokens

    def answered(self, *, num_choices: int, num_output_tokens: int) -> None:
        """Count the answers of a request for an adapter, all of which have ended as they should."""
        counts = self._now()
        counts.num_answered += num_choices
        counts.num_output_tokens += num_output_tokens

    def forget(self, adapter: str) -> None:
        """Drop the requests of a name that is free for another adapter."""
        for counts in self._counts.values():
            counts.num_asked.pop(adapter, None)

    def measured(self) -> MeasuredDemand:
        """Return the demand of the last half hour, or since the start."""
        self._now()
        counts = self._counts.values()
        num_asked: Counter[str] = Counter()
        for each in counts:
            num_asked.update(each.num_asked)
        total, num_answered = (
            sum(each.num_asked_of_all for each in counts),
            sum(each.num_answered for each in counts),
        )
        num_prompt_tokens = sum(each.num_prompt_tokens for each in counts)
        num_output_tokens = sum(each.num_output_tokens for each in counts)
        passed_s = self._clock.now_s() - self._start_s
        return MeasuredDemand(
            seconds=min(passed_s, passed_s % _PERIOD_S + _PERIOD_S * (_NUM_PERIODS - 1)),
            num_asked=num_asked,
            num_asked_of_base=sum(each.num_asked_of_base for each in counts),
            prompt_tokens=num_prompt_tokens / total if total else None,
            output_tokens=num_output_tokens / num_answered if num_answered else None,
        )

    def _now(self) -> _Counts:
        """Return the counts of this minute, and drop those that are too old."""
        minute = int((self._clock.now_s() - self._start_s) // _PERIOD_S)
        if minute not in self._counts:
            self._counts = {at: each for at, each in self._counts.items() if at > minute - _NUM_PERIODS}
            self._counts[minute] = _Counts()
        return self._counts[minute]
