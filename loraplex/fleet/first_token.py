"""Predict when a request would get its first token on a replica, and how long each later one would take.

It waits for the work before it: waiting prompts are prefilled in steps that also decode, a place in the batch
or KV memory may have to become free, and the adapter may have to be loaded. A tenant that may run only so
many requests waits for one of its own to end, as the schedule decides it (`core.due_places`).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.core.due_places import longest_step_s
from loraplex.fleet.admission import Admitted, Bounded, Forecast
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.view import FleetView
from loraplex.perf.set_costs import RequestSets

_PREFILL_SHARE: Final = 0.25
"""Share of a step reserved for prompts however much is decoded, as in `scheduling.work`."""


def forecast(
    request: RoutedRequest, view: FleetView, replica: int, *, admitted: Admitted, step_tokens: int
) -> Forecast:
    """Predict the first token of a request that is sent to this replica now, before it counts as its load.

    `admitted`: admitted requests, of which those not sent to a replica yet are taken to be shared evenly by
    all replicas that accept requests; its `part_before` of all that wait is served before this request.
    `step_tokens`: most tokens that a step prefills and decodes.
    """
    load, costs, here = view.load, view.costs, np.array([replica])
    unsent, num_accepting = _unsent(view, admitted), max(int(load.accepts.sum()), 1)
    everything, waiting = (
        _with_more(sets, unsent, num_accepting, load.answers.mean_tokens)
        for sets in load.with_one_more(request, here)
    )
    behind = 1.0 - admitted.part_before
    later = _row(waiting, 0)
    before, after = (_less(_row(everything, number), later, behind) for number in (0, 1))
    queue = _less(_row(waiting, 1), later, behind)
    max_running = load.max_running[here]
    batch_s = costs.decode_s(before.at_most(max_running))
    # Earlier requests decode while it waits: all running ones, and on average half of the waiting ones.
    decoding = _less(before, later, 0.5 * admitted.part_before).at_most(max_running)
    budget = np.maximum(step_tokens - decoding.num_requests, step_tokens * _PREFILL_SHARE)
    num_steps = np.ceil(queue.prompt_tokens / budget)
    read_s = costs.prefill_s(queue) + num_steps * costs.decode_s(decoding)
    # Places and KV memory become free as answers end, evenly over the duration of an answer.
    too_many = np.maximum(after.num_requests - max_running, 0) / max_running
    too_large = np.maximum(after.kv_tokens / load.kv_capacity[here] - 1, 0)
    room_s = load.answers.mean_tokens * batch_s * np.maximum(too_many, too_large)
    load_s = view.load_s(request, here)
    alone_s = costs.prefill_s(_alone(request)) + load_s
    own_s = 0.0
    if admitted.bounded is not None:
        own_s = _own_room_s(admitted.bounded, before, view, replica, num_accepting)
    ttft_s = np.maximum(np.maximum(read_s + room_s, own_s) + load_s, alone_s)
    tpt_s = costs.decode_s(after.at_most(max_running))
    return Forecast(
        float(ttft_s[0]), float(alone_s[0]), is_idle=not everything.num_requests[0, 0], tpt_s=float(tpt_s[0])
    )


def _own_room_s(
    bounded: Bounded, before: RequestSets, view: FleetView, replica: int, num_replicas: int
) -> float:
    """Return the seconds until a bounded tenant may run one more request. `before`: those that run, and wait
    before it. `num_replicas`: how many accept requests."""
    load, costs = view.load, view.costs
    most = int(load.max_running[replica])
    num_own, num_due = _of_replica(bounded, view, replica, num_replicas)
    if num_due is None or num_own < num_due:
        return 0.0
    num_others = min(max(float(before.num_requests[0]) - num_own, 0.0), most - 1)
    nums = np.arange(num_due, max(num_own, num_due) + 2.0)
    mix = np.maximum(before.num_requests, 1)
    steps_s = costs.decode_s(
        RequestSets(
            num_requests=num_others + nums,
            sum_ranks=before.sum_ranks / mix * (num_others + nums),
            max_rank=before.max_rank + 0.0 * nums,
            prompt_tokens=before.prompt_tokens / mix * (num_others + nums),
            kv_tokens=before.kv_tokens / mix * (num_others + nums),
            num_adapters=before.num_adapters / mix * (num_others + nums),
        )
    )
    most_s = longest_step_s(float(steps_s[0]), bounded.bound, bounded.paces_s)
    # Steps get longer with what is in them, so these are the first ones.
    num_allowed = max(int((steps_s <= most_s).sum()), 1)
    places = num_due - 1 + num_allowed
    num_too_many = num_own + 1 - places
    return max(num_too_many, 0) / places * load.answers.mean_tokens * float(steps_s[num_allowed - 1])


def _of_replica(bounded: Bounded, view: FleetView, replica: int, num_replicas: int) -> tuple[int, int | None]:
    """Return how many requests a bounded tenant has on a replica before the one asked about, and how many it
    is due to run there: each replica bounds it by the others that it has itself. None where it has none of
    them, and another has some: nothing bounds the tenant there."""
    num_all, own = view.load.everything.num_requests, view.load.of_tenant(bounded.tenant)
    own_here, num_sent = own.get(replica, 0), sum(own.values())
    # Of those sent, some may come after the one asked about; those not sent are shared evenly.
    num_own = own_here * min(bounded.num_before / max(num_sent, 1), 1.0)
    num_own += max(bounded.num_before - num_sent, 0) / num_replicas
    num_others, others_here = float(num_all.sum()) - num_sent, float(num_all[replica]) - own_here
    if others_here <= 0 < num_others:
        return math.ceil(num_own), None
    # Others that no replica has yet will be shared evenly.
    part = others_here / num_others if num_others > 0 else 1 / num_replicas
    return math.ceil(num_own), math.ceil(max(part * bounded.due, 1.0))


def _unsent(view: FleetView, admitted: Admitted) -> Admitted:
    """Return the admitted requests that no replica has yet."""
    waiting = view.load.waiting
    return Admitted(
        max(admitted.num_requests - int(waiting.num_requests.sum()), 0),
        max(admitted.prompt_tokens - int(waiting.prompt_tokens.sum()), 0),
    )


def _with_more(sets: RequestSets, more: Admitted, num_replicas: int, mean_tokens: float) -> RequestSets:
    """Return sets with a replica's share of these requests, whose adapters are unknown."""
    num_requests, prompt_tokens = more.num_requests / num_replicas, more.prompt_tokens / num_replicas
    return sets._replace(
        num_requests=sets.num_requests + num_requests,
        prompt_tokens=sets.prompt_tokens + prompt_tokens,
        kv_tokens=sets.kv_tokens + prompt_tokens + num_requests * mean_tokens,
    )


def _row(sets: RequestSets, number: int) -> RequestSets:
    return RequestSets(*(column[number] for column in sets))


def _less(sets: RequestSets, others: RequestSets, share: float) -> RequestSets:
    """Return sets without a share of others that are part of them."""
    return sets._replace(
        num_requests=sets.num_requests - share * others.num_requests,
        sum_ranks=sets.sum_ranks - share * others.sum_ranks,
        prompt_tokens=sets.prompt_tokens - share * others.prompt_tokens,
        kv_tokens=sets.kv_tokens - share * others.kv_tokens,
    )


def _alone(request: RoutedRequest) -> RequestSets:
    """Return the request as a set of its own."""
    has_adapter = request.adapter is not None
    values = (1, request.rank, request.rank, request.prompt_tokens, request.prompt_tokens, has_adapter)
    columns: list[FloatArray] = [np.full(1, float(value)) for value in values]
    return RequestSets(*columns)
