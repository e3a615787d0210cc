"""The progress of `loraplex profile`, as a share of its total time on this machine, not of its tasks.

The time of a phase differs by a factor of hundreds between machines and models, so the progress is 0 until
something was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from loraplex.bench.profile_host import Report

Progress = Callable[[str, float], None]
"""Called with the name of the phase, and the share of all phases that is done."""


class PhaseProgress:
    """Converts the share of a phase that is done into a share of the time of all phases."""

    def __init__(
        self,
        progress: Progress,
        weights: Mapping[str, float],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`weights`: phases in order, with their time relative to each other. From a phase with 0 the time of
        the others cannot be estimated, nor its own."""
        self._progress = progress
        self._weights = weights
        self._now_s = now_s
        self._start_s = now_s()
        self._phase = ""
        self._phase_start_s = self._start_s
        self._past_s = 0.0
        self._past_weight = 0.0

    def of(self, phase: str) -> Report:
        """End the current phase and begin this one. Return its `Report`, whose share must be a share of the
        phase's time."""
        now_s = self._now_s()
        if (weight := self._weights.get(self._phase, 0.0)) > 0:
            self._past_s += now_s - self._phase_start_s
            self._past_weight += weight
        self._phase, self._phase_start_s = phase, now_s
        self._report(0.0)
        return self._report

    def _report(self, done: float) -> None:
        now_s = self._now_s()
        elapsed_s, left_s = now_s - self._start_s, self._left_s(now_s - self._phase_start_s, done)
        all_s = 0.0 if left_s is None else elapsed_s + left_s
        self._progress(self._phase, elapsed_s / all_s if all_s > 0 else 0.0)

    def _left_s(self, phase_s: float, done: float) -> float | None:
        """Return the seconds left for this phase and those after it; None if they are not known yet."""
        weight = self._weights[self._phase]
        if weight == 0 or (done == 0 and self._past_weight == 0):
            return None
        whole_s = phase_s / done if done > 0 else self._past_s / self._past_weight * weight
        names = list(self._weights)
        later = sum(self._weights[name] for name in names[names.index(self._phase) + 1 :])
        pace_s = (self._past_s + whole_s) / (self._past_weight + weight)
        return max(whole_s - phase_s, 0.0) + pace_s * later
