"""Merged steps where they are predicted to give more tokens per second, within the bound on delays."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core.batching import DelayBound
from loraplex.scheduling.batching.pause_budget import PauseBudget
from loraplex.scheduling.batching.policy import ALL, StepBatch, View, count_by_adapter, merged_batch
from loraplex.scheduling.request_state import RequestState


class AutoBatching:
    """Compares, before each step, all requests together with those on one adapter alone, merged.

    Merging costs time before it gains any, and how long it would go on gaining is not known. So the engine
    merges once unmerged steps have lost as much as merging costs: then it never takes more than twice the
    time of the better choice. Requests on other adapters pause meanwhile, if they are only decoding, and none
    of them for longer than the bound allows; nor do requests wait longer for their places (`PauseBudget`).
    """

    displaces = False

    def __init__(self, bound: DelayBound) -> None:
        self._bound = bound
        self._budget = PauseBudget(bound)
        self._now_s = 0.0
        self._candidate: str | None = None
        self._lost_s = 0.0  # by unmerged steps, while `_candidate` could have been merged
        self._loses_s = 0.0  # by the step chosen last, if it runs unmerged
        self._waits_s = 0.0  # for each of `_paused`, if it runs merged
        self._paused: list[RequestState] = []

    def choose(self, view: View) -> StepBatch:
        self._loses_s, self._paused, self._now_s = 0.0, [], view.now_s
        if not view.any_waits and not any(each.delayed_s > 0 for each in view.requests):
            self._budget.clear()  # nobody was delayed who has a place that others might wait for
        # Only requests that would run anyway: nobody takes the place of a request that pauses.
        fcfs = view.fcfs
        counts = count_by_adapter(fcfs).most_common()
        candidate = next((each for each, _ in counts if each is not None and view.can_merge(each)), None)
        if candidate != self._candidate:
            self._candidate, self._lost_s = candidate, 0.0
        if candidate is None:
            return ALL
        merged = [each for each in fcfs if each.adapter == candidate]
        paused = [each for each in fcfs if each.adapter != candidate]
        merged_s, merge_s = view.iteration_s(merged, True), view.merge_s(candidate)
        gained_s = len(merged) * view.iteration_s(fcfs, False) / len(fcfs) - merged_s
        waits_s = merged_s + merge_s
        if gained_s <= 0 or not self._may_pause(paused, waits_s, view.now_s):
            self._lost_s = 0.0
            return ALL
        self._loses_s = gained_s
        if view.merged != candidate and self._lost_s + gained_s < merge_s:
            return ALL
        self._paused, self._waits_s = paused, waits_s
        return merged_batch(candidate)

    def ran(self, batch: StepBatch) -> None:
        if batch.merged is None:
            self._lost_s += self._loses_s
            return
        for each in self._paused:
            each.delayed_s += self._waits_s
        if self._paused:
            self._budget.spend(self._waits_s, self._now_s)

    def forget(self, version: str) -> None:
        if self._candidate == version:
            self._candidate, self._lost_s = None, 0.0

    def _may_pause(self, requests: Sequence[RequestState], seconds: float, now_s: float) -> bool:
        """Return whether these requests may wait for a step. Prompts may not: first tokens are waited for."""
        return (not requests or self._budget.allows(seconds, now_s)) and all(
            each.num_remaining == 1
            and each.delayed_s + seconds <= self._bound.allowed_s(now_s - each.arrived_s)
            for each in requests
        )
