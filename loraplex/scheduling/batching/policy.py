"""The view that a batching policy has before each step, and the batch that it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, KeysView, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from loraplex.scheduling.request_state import RequestState

_adapter = attrgetter("adapter")


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
        allowed, only, first = requests, self.only, self.first
        if only is not None:
            allowed = [each for each in requests if each.adapter in only]
        if first:
            allowed = sorted(allowed, key=lambda each: each.adapter not in first)
        return list(allowed[:max_running])


ALL = StepBatch()
"""Everything may run, in order of arrival."""


def merged_batch(version: str) -> StepBatch:
    """Return the batch of all requests on a version, on its merged weights."""
    return StepBatch(merged=version, only=frozenset((version,)))


class View(NamedTuple):
    """An engine before a step.

    `requests`: the running ones, paused or not, and the waiting ones that could be admitted, oldest first. If
    the policy does not displace running requests, these come first, and the others in the queue's order.
    `on_version`: returns all requests on a version, oldest first, whether or not they could be admitted;
    `num_on_version`: their number. `max_running`: most requests in a step. `merged`: the version whose merged
    weights are held. `can_merge`: whether a version's merged weights could be held from this step on.
    `merge_s`: predicted seconds of writing them, 0 if they are held. `iteration_s`: predicted seconds of a
    step in which these requests decode, on merged weights or not. `now_s`: sum of the predicted seconds of
    all steps so far. `any_waits`: whether any request in the engine does not run yet.
    """

    requests: Sequence[RequestState]
    any_waits: bool
    on_version: Callable[[str], Sequence[RequestState]]
    num_on_version: Callable[[str], int]
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

    def adapters(self) -> KeysView[str | None]:
        """Return the adapters of the requests, the oldest first; None is the base model."""
        return dict.fromkeys(map(_adapter, self.requests)).keys()

    def most_requested(self) -> list[str]:
        """Return the adapters of the requests, the one that most requests in the engine are on first, then
        the oldest."""
        versions = [each for each in self.adapters() if each is not None]
        return sorted(versions, key=self.num_on_version, reverse=True)


def count_by_adapter(requests: Iterable[RequestState]) -> Counter[str | None]:
    """Return how many of these requests are on each adapter; None is the base model. An adapter whose first
    request comes earlier is earlier."""
    return Counter(map(_adapter, requests))


class BatchingPolicy(Protocol):
    """Decides the batch of each step. `displaces`: whether an older request that waits takes the place of a
    running one.

        choose   the batch that a step should have; the requests of it may not find memory
        ran      the step that was decided: only now are waiting requests charged for, and thresholds tuned
    """

    displaces: bool

    def choose(self, view: View) -> StepBatch:
        """Return the batch of the next step. Called before each step; what it returns need not run."""
        ...

    def ran(self, batch: StepBatch) -> None:
        """Record that a step was decided with the batch chosen last, or with `ALL` instead, where there was
        no memory for merged weights."""
        ...

    def forget(self, version: str) -> None:
        """Drop what is recorded about a version that was removed."""
        ...
