"""CaraServe's and Toppings' way (Algorithm 1): the replica whose requests a new one slows down least.

A request makes every request of its replica slower: those that wait by its prompt, all by what a decode step
takes longer with its rank in it. A replica where a decode step would then take longer than promised is chosen
only if all others would break the promise too.

Points that the papers leave open: a replica without requests costs nothing, though zero times an infinite
penalty is not a number; where all break the promise, the cheapest of them is taken; equal costs go to fewer
requests, then in turn. A prompt joins a step that is taken anyway, so that what a step with a prompt takes at
the least is not counted: otherwise prompts would gather where one waits already.
"""

from __future__ import annotations

import numpy as np

from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.view import FleetView
from loraplex.perf.set_costs import RequestSets, SetCosts


class RankAwareRouter:
    def __init__(self) -> None:
        self._turns = Turns()
        self._least_s: dict[int, float] = {}
        self._least_of: SetCosts | None = None

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates, load, costs = view.candidates(request), view.load, view.costs
        exists, queue = load.everything.at(candidates), load.waiting.at(candidates)
        adapter, rank, prompt_tokens = request
        kv_tokens = prompt_tokens + load.answers.mean_tokens
        joined = exists.joined_by(
            rank=rank,
            prompt_tokens=prompt_tokens,
            kv_tokens=kv_tokens,
            is_new=load.lacks(adapter, candidates),
        )
        longer = queue.joined_by(
            rank=rank,
            prompt_tokens=prompt_tokens,
            kv_tokens=kv_tokens,
            is_new=load.lacks_waiting(adapter, candidates),
        )
        decode_s = costs.decode_s(joined)
        taken_s = np.maximum(costs.prefill_s(queue), self._least_prefill_s(rank, costs))
        added_prefill_s = np.maximum(costs.prefill_s(longer) - taken_s, 0.0)
        added_decode_s = decode_s - costs.decode_s(exists)
        per_request_s = added_prefill_s / load.answers.mean_tokens + added_decode_s
        num_requests = exists.num_requests
        total_s = per_request_s * num_requests
        if view.slo_s is None:
            return self._turns.pick(candidates, total_s, num_requests)
        return self._turns.pick(candidates, decode_s > view.slo_s, total_s, num_requests)

    def _least_prefill_s(self, rank: int, costs: SetCosts) -> float:
        """What a prompt of one token takes by itself."""
        if costs is not self._least_of:
            self._least_of = costs
            self._least_s.clear()
        if rank not in self._least_s:
            self._least_s[rank] = float(costs.prefill_s(smallest_prompt(rank))[0])
        return self._least_s[rank]


def smallest_prompt(rank: int) -> RequestSets:
    """A set of one request with one token."""
    one, ranks = np.ones(1), np.full(1, float(rank))
    return RequestSets(
        num_requests=one,
        sum_ranks=ranks,
        max_rank=ranks,
        prompt_tokens=one,
        kv_tokens=one,
        num_adapters=np.full(1, float(rank > 0)),
    )
