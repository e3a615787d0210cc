"""dLoRA's reactive migration: a trigger picks replicas, a relaxed program places their requests anew."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from loraplex.core.arrays import BoolArray
from loraplex.fleet.migration.columns import columns_of
from loraplex.fleet.migration.problem import (
    MigrationAdapter,
    MigrationCosts,
    MigrationProblem,
    MigrationReplica,
    MigrationRequest,
    Move,
)
from loraplex.fleet.migration.relaxed import solve_relaxed
from loraplex.fleet.migration.trigger import NUM_PAIRS, PERIOD_S, Column, UnevenReplicas, uneven_replicas


class MigrationView(Protocol):
    """The fleet as migration sees it: columns with one value per replica, the rest of those that enter."""

    @property
    def kv_share(self) -> Column:
        """The share of each replica's KV cache that is in use."""
        ...

    @property
    def num_requests(self) -> Column:
        """Requests that each replica was sent and has not finished."""
        ...

    @property
    def accepts(self) -> Sequence[bool] | BoolArray | None:
        """False for replicas that are down or drain; None if there are none of these."""
        ...

    @property
    def costs(self) -> MigrationCosts: ...

    def replica(self, replica: int) -> MigrationReplica: ...

    def requests_on(self, replica: int) -> Sequence[MigrationRequest]:
        """The requests of a replica, in an order that does not change from one run to the next."""
        ...

    def adapter(self, adapter: int) -> MigrationAdapter: ...


class Migrator:
    """Decides at most once a period which requests move. Its time is handed in."""

    def __init__(
        self, *, period_s: float = PERIOD_S, num_pairs: int = NUM_PAIRS, stay_s: float = 0.0
    ) -> None:
        """`period_s`: from one look at the fleet to the next. `num_pairs`: dLoRA's K; so many overloaded and
        so many underloaded replicas take part in a migration at the most. `stay_s`: a request that was moved
        is not moved again for so long; dLoRA has no such bound."""
        assert period_s > 0
        assert num_pairs > 0
        self._period_s = period_s
        self._num_pairs = num_pairs
        self._stay_s = stay_s
        self._due_s = 0.0
        self._moved_s: dict[Hashable, float] = {}

    @property
    def due_s(self) -> float:
        """The earliest time at which the next `decide` looks at the fleet."""
        return self._due_s

    @property
    def moved_s(self) -> Mapping[Hashable, float]:
        """When the requests were moved that must stay where they are for now."""
        return self._moved_s

    def begin(self, now_s: float) -> None:
        """Begin a period, whatever is left of the one before."""
        self._due_s = now_s + self._period_s

    def restore(self, due_s: float, moved_s: Mapping[Hashable, float]) -> None:
        """Go on where another migrator was."""
        self._due_s = due_s
        self._moved_s = dict(moved_s)

    def decide(self, now_s: float, view: MigrationView) -> list[Move]:
        """Return the moves to be made now; none before the period is over or while the load is even."""
        if now_s < self._due_s:
            return []
        self.begin(now_s)
        uneven = uneven_replicas(
            kv_share=view.kv_share,
            num_requests=view.num_requests,
            accepts=view.accepts,
            num_pairs=self._num_pairs,
        )
        self._moved_s = {each: at_s for each, at_s in self._moved_s.items() if now_s < at_s + self._stay_s}
        moves = [] if uneven is None else moves_for(problem_of(uneven, view, self._moved_s))
        if self._stay_s:
            self._moved_s |= {move.request_id: now_s for move in moves}
        return moves


def problem_of(
    uneven: UnevenReplicas, view: MigrationView, staying: Container[Hashable] = ()
) -> MigrationProblem:
    """Return the problem of the replicas that enter: requests go from overloaded to underloaded ones, but for
    those that are `staying`."""
    replicas = [replace(view.replica(each), gives=True, receives=False) for each in uneven.overloaded]
    replicas += [replace(view.replica(each), gives=False, receives=True) for each in uneven.underloaded]
    requests = [
        replace(request, stays=True) if request.request_id in staying else request
        for each in replicas
        for request in view.requests_on(each.replica)
    ]
    adapters = sorted({request.adapter for request in requests if request.adapter is not None})
    return MigrationProblem(
        replicas=tuple(replicas),
        requests=tuple(requests),
        adapters=tuple(view.adapter(each) for each in adapters),
        costs=view.costs,
    )


def moves_for(problem: MigrationProblem) -> list[Move]:
    """Return moves that shorten the predicted makespan, in the order of the requests; there may be none."""
    columns = columns_of(problem)
    place_N = solve_relaxed(columns).place_N
    moved = np.flatnonzero(place_N != columns.source_N).tolist()
    requests, replicas = problem.requests, problem.replicas
    return [
        Move(requests[i].request_id, requests[i].replica, replicas[place].replica)
        for i, place in zip(moved, place_N[moved].tolist(), strict=True)
    ]
