"""The thresholds of dLoRA's dynamic batching, adapted to the traffic (dLoRA, Algorithm 2).

Both compare the number of requests that a merged step could run with the number that a first-come,
first-served step would. Above `alpha` the engine begins to run merged steps; below `beta` it stops.

At every break point the thresholds are tuned by the steps since the last one. For each of these steps the
throughput of both kinds is known: one was run, the other is predicted. A break point is a change between
merged and unmerged steps, a change of the adapter that is merged or would be, or the end of a fixed number of
steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

PERIOD_STEPS: Final = 32
_DECREMENT: Final = 0.05
_FACTOR: Final = 1.1
_FIRST_ALPHA: Final = 1.0
_MIN_THRESHOLD: Final = 0.05
_MAX_ALPHA: Final = 4.0
"""Without bounds, a threshold that was never reached for long would not come back when traffic changes."""


class Tuning(StrEnum):
    """Which threshold is tuned at a break point."""

    PAPER = "paper"
    """The one that the engine waits to cross: alpha after unmerged steps, beta after merged ones."""
    ARTIFACT = "artifact"
    """The rule of dLoRA's published code: the other one, and every change of the adapter that would be merged
    counts as a merge."""


@dataclass(slots=True)
class _Period:
    """Sums over the steps since the last break point. `num_candidates`: changes of the adapter that would be
    merged."""

    num_steps: int = 0
    num_candidates: int = 0
    merged_requests: int = 0
    merged_s: float = 0.0
    fcfs_requests: int = 0
    fcfs_s: float = 0.0


@dataclass(slots=True)
class AdaptiveThresholds:
    """`alpha`, `beta`: the thresholds; beta is None until the first step."""

    tuning: Tuning = Tuning.PAPER
    alpha: float = _FIRST_ALPHA
    beta: float | None = None
    _period: _Period = field(default_factory=_Period)
    _is_merged: bool = False
    _candidate: str | None = None

    def begin_step(self, *, is_merged: bool, candidate: str | None, switch_s: float) -> None:
        """Tune the thresholds if the step before was the last one of a period. `candidate`: the adapter that
        is merged or would be. `switch_s`: predicted seconds of merging it."""
        changed = is_merged is not self._is_merged or candidate != self._candidate
        if self._period.num_steps > 0 and (changed or self._period.num_steps >= PERIOD_STEPS):
            keeps_period = self.tuning is Tuning.ARTIFACT and not is_merged and not self._is_merged
            if not (keeps_period and self._period.num_steps < PERIOD_STEPS):
                self._tune(switch_s)
                self._period = _Period()
        self._period.num_candidates += candidate != self._candidate
        self._is_merged, self._candidate = is_merged, candidate

    def record(self, *, num_merged: int, merged_s: float, num_fcfs: int, fcfs_s: float) -> None:
        """Add a step: the requests and predicted seconds that it has, or would have, merged and not."""
        if self.beta is None:
            self.beta = min(max(merged_s / fcfs_s, _MIN_THRESHOLD), self.alpha) if fcfs_s > 0 else self.alpha
        period = self._period
        period.num_steps += 1
        period.merged_requests += num_merged
        period.merged_s += merged_s
        period.fcfs_requests += num_fcfs
        period.fcfs_s += fcfs_s

    def _tune(self, switch_s: float) -> None:
        period = self._period
        assert self.beta is not None
        num_switches = period.num_candidates if self.tuning is Tuning.ARTIFACT else 1
        merged_s = period.merged_s + num_switches * switch_s
        if merged_s <= 0 or period.fcfs_s <= 0:
            return
        merging_wins = period.merged_requests / merged_s > period.fcfs_requests / period.fcfs_s
        tunes_alpha = self._is_merged is (self.tuning is Tuning.ARTIFACT)
        if tunes_alpha and merging_wins:
            self.alpha = max(self.alpha - _DECREMENT, self.beta, _MIN_THRESHOLD)
        elif tunes_alpha:
            self.alpha = min(self.alpha * _FACTOR, _MAX_ALPHA)
        elif merging_wins:
            self.beta = max(self.beta / _FACTOR, _MIN_THRESHOLD)
        else:
            self.beta = min(self.beta + _DECREMENT, self.alpha)
