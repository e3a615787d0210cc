"""What one more request adds to the steps of each replica, by the costs of sets of requests."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.view import FleetView
from loraplex.perf.set_costs import RequestSets, SetCosts

# An array without dimensions: numpy takes half as long with it as with a Python number.
_NONE: Final = np.zeros(())


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


class AddedCosts:
    """PrePerf and DecPerf of every candidate with a request and without it.

    A prompt joins a step that is taken anyway, so that what a step with a prompt takes at the least is not
    counted as added: otherwise prompts would gather where one waits already.
    """

    def __init__(self) -> None:
        self._least_s: dict[int, FloatArray] = {}
        self._least_of: SetCosts | None = None

    def by(self, request: RoutedRequest, view: FleetView, candidates: IntArray) -> Added:
        costs = view.costs
        # Sets without the request in the first row, with it in the second: one question for both.
        everything, waiting = view.load.with_one_more(request, candidates)
        before_s, decode_s = costs.decode_s(everything)
        queue_s, longer_s = costs.prefill_s(waiting)
        taken_s = np.maximum(queue_s, self._least_prefill_s(request.rank, costs))
        return Added(
            num_requests=everything.num_requests[0],
            decode_s=decode_s,
            decode_more_s=decode_s - before_s,
            queue_s=queue_s,
            prefill_s=np.maximum(longer_s - taken_s, _NONE),
        )

    def _least_prefill_s(self, rank: int, costs: SetCosts) -> FloatArray:
        """Return the seconds of a step that reads a prompt of one token, as an array without dimensions."""
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
