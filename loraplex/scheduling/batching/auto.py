"""Merged steps where they are predicted to give more tokens per second, within the bound on delays."""

from __future__ import annotations

from typing import NamedTuple

from loraplex.core.batching import PAUSE_SHARE, DelayBound
from loraplex.scheduling.batching.place_lags import PlaceLags
from loraplex.scheduling.batching.policy import ALL, StepBatch, View, count_by_adapter, merged_batch
from loraplex.scheduling.request_state import RequestState


class _MergedStep(NamedTuple):
    """A step of `takes_s` seconds, merging included, in which `merged` run and `paused` do not. A step of all
    of them would take `gains_s` longer."""

    merged: list[RequestState]
    paused: list[RequestState]
    takes_s: float
    gains_s: float


class AutoBatching:
    """Compares, before each step, all requests together with those on one adapter alone, merged.

    Merging costs time before it gains any, and how long it would go on gaining is not known. So the engine
    merges once unmerged steps have lost as much as merging costs: then it never takes more than twice the
    time of the better choice. Requests on other adapters pause meanwhile, if they are only decoding, and none
    of them for longer than the bound allows; nor do requests wait longer for their places (`PlaceLags`).
    """

    displaces = False

    def __init__(self, bound: DelayBound) -> None:
        self._bound = bound
        self._lags = PlaceLags()
        self._candidate: str | None = None
        self._lost_s = 0.0  # by unmerged steps, while `_candidate` could have been merged
        self._loses_s = 0.0  # by the step chosen last, if it runs unmerged
        self._step: _MergedStep | None = None  # the step chosen last, if it runs merged

    def choose(self, view: View) -> StepBatch:
        self._loses_s, self._step = 0.0, None
        # Only requests that would run anyway: nobody takes the place of a request that pauses.
        fcfs = view.fcfs
        placed = [each for each in fcfs if each.num_cached is not None]
        self._lags.place(placed, view.now_s, any_waits=view.any_waits)
        counts = count_by_adapter(fcfs).most_common()
        candidate = next((each for each, _ in counts if each is not None and view.can_merge(each)), None)
        if candidate != self._candidate:
            self._candidate, self._lost_s = candidate, 0.0
        if candidate is None:
            return ALL
        merged = [each for each in fcfs if each.adapter == candidate]
        paused = [each for each in fcfs if each.adapter != candidate]
        merged_s, merge_s = view.iteration_s(merged, True), view.merge_s(candidate)
        fcfs_s = view.iteration_s(fcfs, False)
        gained_s = len(merged) * fcfs_s / len(fcfs) - merged_s
        step = _MergedStep(merged, paused, merged_s + merge_s, fcfs_s - merged_s - merge_s)
        if gained_s <= 0 or not self._may_pause(step, view):
            self._lost_s = 0.0
            return ALL
        self._loses_s = gained_s
        if view.merged != candidate and self._lost_s + gained_s < merge_s:
            return ALL
        self._step = step
        return merged_batch(candidate)

    def ran(self, batch: StepBatch) -> None:
        if batch.merged is None:
            self._lost_s += self._loses_s
            return
        assert self._step is not None
        for each in self._step.merged:
            each.lag_s -= self._step.gains_s
        for each in self._step.paused:
            each.lag_s += self._step.takes_s
            each.delayed_s += self._step.takes_s

    def forget(self, version: str) -> None:
        if self._candidate == version:
            self._candidate, self._lost_s = None, 0.0

    def _may_pause(self, step: _MergedStep, view: View) -> bool:
        """Return whether requests may wait for a step. Prompts may not: first tokens are waited for."""
        if not step.paused:
            return True
        now_s, allowed_s = view.now_s, self._bound.allowed_s
        for each in step.paused:
            most_s = allowed_s(now_s - each.arrived_s)
            decodes = each.num_cached is not None and each.num_remaining == 1
            if not decodes or each.delayed_s + step.takes_s > most_s:
                return False
        # The request that gets the next place has waited as long as the first that waits now.
        since_s = min((each.arrived_s for each in view.requests[view.max_running :]), default=now_s)
        latest_s = self._lags.latest_s(step.paused, step.takes_s, step.gains_s, now_s)
        return latest_s <= PAUSE_SHARE * allowed_s(now_s - since_s)
