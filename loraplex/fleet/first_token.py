"""When a request would have its first token on a replica.

It waits for what the replica has to do before: prompts that wait are read in steps that also decode, a place
in the batch or room in KV memory may have to come free, and the adapter may have to be loaded.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.fleet.admission import Admitted, Forecast
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.view import FleetView
from loraplex.perf.set_costs import RequestSets

_PREFILL_SHARE: Final = 0.25
"""The share of a step that prompts have however much is decoded, as in `scheduling.work`."""


def forecast(
    request: RoutedRequest, view: FleetView, replica: int, *, admitted: Admitted, step_tokens: int
) -> Forecast:
    """Predict the first token of a request that is sent to this replica now, before it counts as its load.

    `admitted`: of which those that no replica was sent yet count as shared evenly by all that accept
    requests. `step_tokens`: the most that a step reads and decodes.
    """
    load, costs, here = view.load, view.costs, np.array([replica])
    unsent, num_accepting = _unsent(view, admitted), max(int(load.accepts.sum()), 1)
    everything, waiting = (
        _with_more(sets, unsent, num_accepting, load.answers.mean_tokens)
        for sets in load.with_one_more(request, here)
    )
    before, after = _row(everything, 0), _row(everything, 1)
    queue = _row(waiting, 1)
    max_running = load.max_running[here]
    batch_s = costs.decode_s(before.at_most(max_running))
    # Those before it decode while it waits: all that run, and on the mean half of those that wait as well.
    decoding = _less(before, _row(waiting, 0), 0.5).at_most(max_running)
    budget = np.maximum(step_tokens - decoding.num_requests, step_tokens * _PREFILL_SHARE)
    num_steps = np.ceil(queue.prompt_tokens / budget)
    read_s = costs.prefill_s(queue) + num_steps * costs.decode_s(decoding)
    # Places and KV memory come free as answers end, evenly over the time that an answer takes.
    too_many = np.maximum(after.num_requests - max_running, 0) / max_running
    too_large = np.maximum(after.kv_tokens / load.kv_capacity[here] - 1, 0)
    room_s = load.answers.mean_tokens * batch_s * np.maximum(too_many, too_large)
    load_s = view.load_s(request, here)
    alone_s = costs.prefill_s(_alone(request)) + load_s
    ttft_s = np.maximum(read_s + room_s + load_s, alone_s)
    return Forecast(float(ttft_s[0]), float(alone_s[0]), is_idle=not before.num_requests[0])


def _unsent(view: FleetView, admitted: Admitted) -> Admitted:
    """Return those that were let in and that no replica has."""
    waiting = view.load.waiting
    return Admitted(
        max(admitted.num_requests - int(waiting.num_requests.sum()), 0),
        max(admitted.prompt_tokens - int(waiting.prompt_tokens.sum()), 0),
    )


def _with_more(sets: RequestSets, more: Admitted, num_replicas: int, mean_tokens: float) -> RequestSets:
    """Return sets with a replica's share of these requests; nobody knows their adapters."""
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
