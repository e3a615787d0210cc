"""The view that a batching policy has before each step, and the batch that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from loraplex.scheduling.request_state import RequestState


class StepBatch(NamedTuple):
    """The requests that a step may run.

    `merged`: the version whose merged weights the step runs on; then only requests on it run. `only`: the
    adapters whose requests may run (None for the base model); None for all. `first`: adapters whose requests
    come before all others, and may take the place of running ones. Among the rest, older requests come first.
    """

    merged: str | None = None
    only: frozenset[str | None] | None = None
    first: frozenset[str | None] = frozenset()

    def allows(self, adapter: str | None) -> bool:
        """Return whether requests on this adapter may run."""
        return self.only is None or adapter in self.only

    def select(self, requests: Sequence[RequestState], max_running: int) -> list[RequestState]:
        """Return the requests that run, of these, which are in order of arrival."""
        allowed = [each for each in requests if self.allows(each.adapter)]
        if self.first:
            allowed.sort(key=lambda each: each.adapter not in self.first)
        return allowed[:max_running]


ALL = StepBatch()
"""Everything may run, in order of arrival."""


def merged_batch(version: str) -> StepBatch:
    """Return the batch of all requests on a version, on its merged weights."""
    return StepBatch(merged=version, only=frozenset((version,)))


class View(NamedTuple):
    """An engine before a step.

    `requests`: the running ones, paused or not, and the waiting ones that could be admitted, oldest first. If
    the policy does not displace running requests, these come first, and the others in the queue's order.
    `on_version`: returns all requests on a version, oldest first, whether or not they could be admitted.
    `max_running`: most requests in a step. `merged`: the version whose merged weights are held. `can_merge`:
    whether a version's merged weights could be held from this step on. `merge_s`: predicted seconds of
    writing them, 0 if they are held. `iteration_s`: predicted seconds of a step in which these requests
    decode, on merged weights or not. `now_s`: sum of the predicted seconds of all steps so far.
    """

    requests: Sequence[RequestState]
    on_version: Callable[[str], Sequence[RequestState]]
    max_running: int
    merged: str | None
    can_merge: Callable[[str], bool]
    merge_s: Callable[[str], float]
    iteration_s: Callable[[Sequence[RequestState], bool], float]
    now_s: float

    @property
    def fcfs(self) -> Sequence[RequestState]:
        """The oldest requests that fit a step."""
        return self.requests[: self.max_running]

    def most_requested(self) -> list[str]:
        """Return the adapters of the requests, the one that most are on first, then the oldest."""
        versions = dict.fromkeys(each.adapter for each in self.requests if each.adapter is not None)
        return sorted(versions, key=lambda version: -len(self.on_version(version)))


class BatchingPolicy(Protocol):
    """Decides the batch of each step. `displaces`: whether an older request that waits takes the place of a
    running one."""

    displaces: bool

    def choose(self, view: View) -> StepBatch:
        """Return the batch of the next step. Called once before each step, in order."""
        ...

    def forget(self, version: str) -> None:
        """Drop what is recorded about a version that was removed."""
        ...
