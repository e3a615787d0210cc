"""dLoRA's batching: merged or unmerged, step by step (dLoRA, Algorithm 1)."""

from __future__ import annotations

from loraplex.scheduling.batching.credits import Credits
from loraplex.scheduling.batching.policy import ALL, StepBatch, View, merged_batch
from loraplex.scheduling.batching.thresholds import AdaptiveThresholds, Tuning


class DynamicBatching:
    """Runs the requests on one adapter merged, while the others pause, when there are enough of them:

        merged on it      num_merged / num_fcfs < beta, or it cannot pay   -->   unmerged
        unmerged          num_merged / num_fcfs > alpha, and it can pay    -->   merged on it

    `num_merged`: requests on the adapter, waiting or running, without a limit. `num_fcfs`: requests that
    first come, first served would run. An adapter that starves runs before all of this.
    """

    displaces = True

    def __init__(self, thresholds: AdaptiveThresholds | None = None, credits: Credits | None = None) -> None:
        self.thresholds = thresholds or AdaptiveThresholds(Tuning.PAPER)
        self.credits = credits or Credits()
        self._merged: str | None = None  # the adapter that the last step ran merged, or would have

    def choose(self, view: View) -> StepBatch:
        fcfs = view.fcfs
        if not fcfs:
            return ALL
        fcfs_s = view.iteration_s(fcfs, False)
        starving = self.credits.starving_among({each.adapter for each in view.requests})
        if starving:
            batch = StepBatch(first=starving)
            self.credits.transfer(batch.select(view.requests, view.max_running), fcfs, fcfs_s)
            return batch
        candidate = self._candidate(view, fcfs_s)
        merged = view.on_version(candidate)[: view.max_running] if candidate is not None else ()
        merged_s = view.iteration_s(merged, True) if merged else 0.0
        runs_merged = candidate is not None and self._should_merge(view, candidate)
        self.thresholds.begin_step(
            is_merged=runs_merged,
            candidate=candidate,
            switch_s=0.0 if candidate is None else view.merge_s(candidate),
        )
        self.thresholds.record(num_merged=len(merged), merged_s=merged_s, num_fcfs=len(fcfs), fcfs_s=fcfs_s)
        if candidate is None or not runs_merged:
            self._merged = None
            return ALL
        self._merged = candidate
        self.credits.transfer(merged, fcfs, merged_s)
        return merged_batch(candidate)

    def forget(self, version: str) -> None:
        self.credits.forget(version)
        if self._merged == version:
            self._merged = None

    def _candidate(self, view: View, step_s: float) -> str | None:
        """Return the adapter that is merged, if it may go on; otherwise the most requested one that may be
        merged."""
        wanted = view.most_requested() if self._merged is None else [self._merged]
        return next((each for each in wanted if self._may_merge(view, each, step_s)), None)

    def _may_merge(self, view: View, version: str, step_s: float) -> bool:
        num_displaced = sum(each.adapter != version for each in view.fcfs)
        return view.can_merge(version) and self.credits.can_pay(version, num_displaced, step_s)

    def _should_merge(self, view: View, candidate: str) -> bool:
        share = len(view.on_version(candidate)) / len(view.fcfs)
        if self._merged is None:
            return share > self.thresholds.alpha
        return self.thresholds.beta is None or share >= self.thresholds.beta
