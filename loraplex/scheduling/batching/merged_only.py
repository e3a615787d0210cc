"""One adapter at a time, merged: the baseline that dLoRA calls merged-only."""

from __future__ import annotations

from loraplex.scheduling.batching.policy import ALL, StepBatch, View, merged_batch


class MergedOnly:
    """Runs the adapter of the oldest request, with all requests on it, until that request ends. So every
    request runs at the latest when it is the oldest. Requests for the base model run on the base weights."""

    displaces = True

    def choose(self, view: View) -> StepBatch:
        if not view.requests:
            return ALL
        version = view.requests[0].adapter
        if version is None:
            return StepBatch(only=frozenset((None,)))
        return merged_batch(version) if view.can_merge(version) else ALL

    def ran(self, batch: StepBatch) -> None:
        """Do nothing: nothing is recorded."""

    def forget(self, version: str) -> None:
        """Do nothing: nothing is recorded."""
