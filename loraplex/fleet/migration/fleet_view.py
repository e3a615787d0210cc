"""The fleet's view in the form that migration needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

import numpy as np

from loraplex.core.arrays import BoolArray, FloatArray
from loraplex.fleet.load import FleetLoad
from loraplex.fleet.migration.problem import (
    MigrationAdapter,
    MigrationCosts,
    MigrationReplica,
    MigrationRequest,
)
from loraplex.fleet.routers.added_costs import smallest_prompt
from loraplex.fleet.view import FleetView
from loraplex.perf.line import Line

_MANY_TOKENS: Final = 1024


class FleetMigrationView:
    """A view of the fleet for migration. `num_output`: returns the output tokens of a request so far; None if
    it has ended meanwhile."""

    def __init__(
        self, view: FleetView, num_output: Callable[[Hashable], int | None], gamma: float = 1.0
    ) -> None:
        self._view = view
        self._load: FleetLoad = view.load
        self._num_output = num_output
        # Requests beyond the batch wait, and take no part in a step.
        self._num_running = np.minimum(view.load.everything.num_requests, view.load.max_running)
        self._decode_s = view.costs.decode_s(view.load.everything.at_most(view.load.max_running))
        self._gamma = gamma

    @property
    def kv_share(self) -> FloatArray:
        """The share of each replica's KV memory that is in use: the tokens so far of all requests with a
        first token. This iterates over every request, once per period. Prompt tokens of other requests in the
        cache cannot be seen from outside."""
        used = np.zeros(self._load.num_replicas)
        for request_id, request, replica in self._load.running():
            num_output = self._num_output(request_id)
            used[replica] += 0 if num_output is None else request.prompt_tokens + num_output
        share: FloatArray = used / self._load.kv_capacity
        return share

    @property
    def num_requests(self) -> FloatArray:
        return np.asarray(self._load.everything.num_requests, np.float64)

    @property
    def accepts(self) -> BoolArray:
        return self._load.accepts

    @property
    def costs(self) -> MigrationCosts:
        one = smallest_prompt(0)
        many = one._replace(prompt_tokens=np.full(1, float(_MANY_TOKENS)))
        least_s, most_s = (float(self._view.costs.prefill_s(each)[0]) for each in (one, many))
        token_s = (most_s - least_s) / (_MANY_TOKENS - 1)
        # A replica without room preempts and recomputes: a token too many costs its prefill.
        return MigrationCosts(
            prefill=Line(latency_s=least_s, unit_s=token_s), swap_s_per_token=token_s, gamma=self._gamma
        )

    @property
    def output_token_s(self) -> float:
        """Seconds of a replica's time that an output token takes now, averaged over requests."""
        return float(self._decode_s.sum() / max(float(self._num_running.sum()), 1.0))

    def replica(self, replica: int) -> MigrationReplica:
        limits = self._load.limits[replica]
        return MigrationReplica(
            replica=replica,
            kv_capacity_tokens=limits.kv_tokens,
            adapters=self._view.tiers.adapters_on_device(replica),
            max_adapters=limits.max_adapters,
        )

    def requests_on(self, replica: int) -> Sequence[MigrationRequest]:
        """Return the requests of a replica. Each takes its share of every step until its answer has the
        expected length."""
        share_s = float(self._decode_s[replica]) / max(float(self._num_running[replica]), 1.0)
        found = []
        for request_id, request in self._load.requests_on(replica):
            num_output = self._num_output(request_id)
            if num_output is None:
                continue
            found.append(
                MigrationRequest(
                    request_id=request_id,
                    adapter=request.adapter,
                    replica=replica,
                    kv_tokens=request.prompt_tokens + num_output,
                    expected_s=self._load.output_left(request, num_output) * share_s,
                )
            )
        return found

    def adapter(self, adapter: int) -> MigrationAdapter:
        moves = self._view.moves
        return MigrationAdapter(
            adapter=adapter,
            load_s=moves.from_host_s(adapter),
            fetch_s=moves.from_elsewhere_s(adapter),
            on_host=frozenset(self._view.tiers.on_host(adapter)),
        )
