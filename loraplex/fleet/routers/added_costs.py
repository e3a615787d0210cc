"""The costs of one more request: how much longer it makes the steps of each replica.

A prompt joins a step that runs anyway: the time of a step with any prompt, however short, is not a cost of
the prompt. In the papers' linear models it is the constant term, which cancels in the difference; with a
model of whole steps, a replica without prompts would be charged for it, and prompts would gather where one
waits already.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.view import FleetView
from loraplex.perf.set_costs import RequestSets, SetCosts

# A zero-dimensional array: numpy is twice as fast with it as with a Python number.
_ZERO: Final = np.zeros(())


class Added(NamedTuple):
    """The costs of one more request, with one value per candidate.

    `num_requests`: the candidate's requests so far. `decode_s`: seconds of a decode step with the new one,
    `decode_more_s`: how much longer that is than without it. `queue_s`: seconds to prefill the waiting
    prompts, `prefill_s`: how much longer that takes with the new one, beyond the time of a step with any
    prompt.
    """

    num_requests: npt.NDArray[Any]
    decode_s: FloatArray
    decode_more_s: FloatArray
    queue_s: FloatArray
    prefill_s: FloatArray


class AddedCosts:
    """Queries the cost model of a view, and caches the prefill time of the shortest prompt of each rank."""

    def __init__(self) -> None:
        self._least_s: dict[int, FloatArray] = {}
        self._least_of: SetCosts | None = None

    def of(self, request: RoutedRequest, view: FleetView, candidates: IntArray) -> Added:
        """Return the costs of every candidate with a request and without it (PrePerf and DecPerf in the
        papers)."""
        costs = view.costs
        # Sets without the request in the first row, with it in the second: one call computes both.
        everything, waiting = view.load.with_one_more(request, candidates)
        before_s, decode_s = costs.decode_s(everything)
        queue_s, longer_s = costs.prefill_s(waiting)
        taken_anyway_s = np.maximum(self._least_prefill_s(request.rank, costs), queue_s)
        return Added(
            num_requests=everything.num_requests[0],
            decode_s=decode_s,
            decode_more_s=decode_s - before_s,
            queue_s=queue_s,
            prefill_s=np.maximum(longer_s - taken_anyway_s, _ZERO),
        )

    def _least_prefill_s(self, rank: int, costs: SetCosts) -> FloatArray:
        """Return the seconds of a step that prefills a prompt of one token, as a zero-dimensional array."""
        if costs is not self._least_of:
            self._least_of = costs
            self._least_s.clear()
        if rank not in self._least_s:
            self._least_s[rank] = costs.prefill_s(smallest_prompt(rank)).reshape(())
        return self._least_s[rank]


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
