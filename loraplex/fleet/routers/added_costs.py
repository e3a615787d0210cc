"""The costs of one more request: how much longer it makes the steps of each replica."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.view import FleetView
from loraplex.perf.set_costs import RequestSets


class Added(NamedTuple):
    """The costs of one more request, with one value per candidate.

    `num_requests`: the requests that the candidate has already. `decode_s`: the seconds of a decode step with
    the new one, `decode_more_s`: how much longer that is than without it. `queue_s`: the seconds to read the
    prompts that wait, `prefill_s`: how much longer that takes with the new one.
    """

    num_requests: npt.NDArray[Any]
    decode_s: FloatArray
    decode_more_s: FloatArray
    queue_s: FloatArray
    prefill_s: FloatArray


def added_costs(request: RoutedRequest, view: FleetView, candidates: IntArray) -> Added:
    """Return PrePerf and DecPerf of every candidate with a request and without it."""
    costs = view.costs
    # Sets without the request in the first row, with it in the second: one question for both.
    everything, waiting = view.load.with_one_more(request, candidates)
    before_s, decode_s = costs.decode_s(everything)
    queue_s, longer_s = costs.prefill_s(waiting)
    return Added(
        num_requests=everything.num_requests[0],
        decode_s=decode_s,
        decode_more_s=decode_s - before_s,
        queue_s=queue_s,
        prefill_s=longer_s - queue_s,
    )


def smallest_prompt(rank: int) -> RequestSets:
    """Return a set of one request with one token."""
    one, ranks = np.ones(1), np.full(1, float(rank))
    return RequestSets(
        num_requests=one,
        sum_ranks=ranks,
        max_rank=ranks,
        prompt_tokens=one,
        kv_tokens=one,
        num_adapters=np.full(1, float(rank > 0)),
    )
