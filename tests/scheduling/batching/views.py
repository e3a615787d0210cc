"""Requests and views for tests of batching policies, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling.batching.policy import BatchingPolicy, StepBatch, View
from loraplex.scheduling.request_state import RequestState

MERGED_S = 0.010
"""Seconds of a merged step, and of each adapter in an unmerged one on top of that."""
ADAPTER_S = 0.002
MERGE_S = 0.005


def requests(adapters: str, *, decoding: bool = True) -> list[RequestState]:
    """Return one request for each letter, on that adapter, or on the base model for `-`, in order of
    arrival."""
    made = []
    for number, letter in enumerate(adapters):
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=[number] * 4,
            params=SamplingParams(max_tokens=8),
            adapter=None if letter == "-" else letter,
        )
        state = RequestState(request, arrival=number)
        state.num_computed = 3 if decoding else 0
        made.append(state)
    return made


def running(adapters: str) -> list[RequestState]:
    """Return requests as above that were admitted."""
    made = requests(adapters)
    for each in made:
        each.num_cached = 0
    return made


def view(
    made: Sequence[RequestState],
    *,
    max_running: int = 4,
    merged: str | None = None,
    mergeable: str = "abcdefgh",
    now_s: float = 0.0,
    any_waits: bool = False,
) -> View:
    """Return a view of these requests. A step takes longer with each adapter in it, and a merged one as long
    as one of the base model."""

    def iteration_s(batch: Sequence[RequestState], is_merged: bool) -> float:
        adapters = {each.adapter for each in batch} - {None}
        return MERGED_S + (0.0 if is_merged else ADAPTER_S * len(adapters))

    return View(
        requests=made,
        any_waits=any_waits,
        on_version=lambda version: [each for each in made if each.adapter == version],
        num_on_version=lambda version: sum(each.adapter == version for each in made),
        max_running=max_running,
        merged=merged,
        can_merge=lambda version: version in mergeable,
        merge_s=lambda version: 0.0 if version == merged else MERGE_S,
        iteration_s=iteration_s,
        now_s=now_s,
    )


def step(policy: BatchingPolicy, seen: View) -> StepBatch:
    """Return the batch that the policy chooses, after a step with it."""
    batch = policy.choose(seen)
    policy.ran(batch)
    return batch


def ids(made: Sequence[RequestState]) -> list[str]:
    return [each.request_id for each in made]
