"""dLoRA's batching: merged or unmerged, step by step (dLoRA, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.scheduling.batching.credits import Credits
from loraplex.scheduling.batching.policy import ALL, StepBatch, View, count_by_adapter, merged_batch
from loraplex.scheduling.batching.thresholds import AdaptiveThresholds, Tuning
from loraplex.scheduling.request_state import RequestState


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """A step that was chosen. `fcfs`: the requests that first come, first served would run, in `fcfs_s`.
    `served`: those that run out of turn, if they do, in `served_s`: on adapters that starve, or on
    `candidate`, which it takes `switch_s` to merge."""

    fcfs: Sequence[RequestState]
    fcfs_s: float
    served: Sequence[RequestState] = ()
    served_s: float = 0.0
    candidate: str | None = None
    switch_s: float = 0.0


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
        self._merged: str | None = None  # the adapter that the last step ran merged
        self._choice: _Choice | None = None

    def choose(self, view: View) -> StepBatch:
        self._choice = None
        fcfs = view.fcfs
        if not fcfs:
            return ALL
        fcfs_s = view.iteration_s(fcfs, False)
        starving = self.credits.starving_among(view.adapters())
        if starving:
            batch = StepBatch(first=starving)
            served = batch.select(view.requests, view.max_running)
            self._choice = _Choice(fcfs=fcfs, fcfs_s=fcfs_s, served=served, served_s=fcfs_s)
            return batch
        candidate = self._candidate(view, fcfs, fcfs_s)
        if candidate is None:
            self._choice = _Choice(fcfs=fcfs, fcfs_s=fcfs_s)
            return ALL
        merged = view.on_version(candidate)[: view.max_running]
        self._choice = _Choice(
            fcfs=fcfs,
            fcfs_s=fcfs_s,
            served=merged,
            served_s=view.iteration_s(merged, True) if merged else 0.0,
            candidate=candidate,
            switch_s=view.merge_s(candidate),
        )
        runs_merged = self._should_merge(view.num_on_version(candidate) / len(fcfs))
        return merged_batch(candidate) if runs_merged else ALL

    def ran(self, batch: StepBatch) -> None:
        choice = self._choice
        if choice is None:
            return
        if batch.first:
            self.credits.transfer(choice.served, choice.fcfs, choice.served_s)
            return
        self.thresholds.begin_step(
            is_merged=batch.merged is not None, candidate=choice.candidate, switch_s=choice.switch_s
        )
        self.thresholds.record(
            num_merged=len(choice.served),
            merged_s=choice.served_s,
            num_fcfs=len(choice.fcfs),
            fcfs_s=choice.fcfs_s,
        )
        self._merged = batch.merged
        if batch.merged is not None:
            self.credits.transfer(choice.served, choice.fcfs, choice.served_s)

    def forget(self, version: str) -> None:
        self.credits.forget(version)
        if self._merged == version:
            self._merged = None

    def _candidate(self, view: View, fcfs: Sequence[RequestState], step_s: float) -> str | None:
        """Return the adapter that is merged, if it may go on; otherwise the most requested one that may be
        merged. `step_s`: seconds of a step that runs `fcfs`."""
        wanted = view.most_requested() if self._merged is None else [self._merged]
        counts = count_by_adapter(fcfs)
        return next(
            (
                each
                for each in wanted
                if view.can_merge(each) and self.credits.can_pay(each, len(fcfs) - counts[each], step_s)
            ),
            None,
        )

    def _should_merge(self, share: float) -> bool:
        if self._merged is None:
            return share > self.thresholds.alpha
        return self.thresholds.beta is None or share >= self.thresholds.beta
