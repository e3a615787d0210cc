"""dLoRA's reactive migration: a trigger picks replicas, and a relaxed program places their requests again."""

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
    """The fleet as migration sees it: columns with one value per replica, and details of those that take
    part."""

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
        """False for replicas that are down or drained; None if there are none of these."""
        ...

    @property
    def costs(self) -> MigrationCosts: ...

    def replica(self, replica: int) -> MigrationReplica: ...

    def requests_on(self, replica: int) -> Sequence[MigrationRequest]:
        """Return the requests of a replica, in an order that is the same in every run."""
        ...

    def adapter(self, adapter: int) -> MigrationAdapter: ...


class Migrator:
    """Decides at most once per period which requests move. The time is passed in."""

    def __init__(
        self, *, period_s: float = PERIOD_S, num_pairs: int = NUM_PAIRS, stay_s: float = 0.0
    ) -> None:
        """`period_s`: seconds between two decisions. `num_pairs`: dLoRA's K; at most this many overloaded and
        this many underloaded replicas take part in a migration. `stay_s`: seconds for which a request that
        was moved is not moved again; dLoRA has no such limit."""
        assert period_s > 0
        assert num_pairs > 0
        self._period_s = period_s
        self._num_pairs = num_pairs
        self._stay_s = stay_s
        self._due_s = 0.0
        self._moved_s: dict[Hashable, float] = {}

    @property
    def due_s(self) -> float:
        """The earliest time in seconds at which the next `decide` looks at the fleet."""
        return self._due_s

    @property
    def moved_s(self) -> Mapping[Hashable, float]:
        """Times at which requests were moved that must stay for now, by request."""
        return self._moved_s

    def begin(self, now_s: float) -> None:
        """Begin a new period, whatever is left of the last one."""
        self._due_s = now_s + self._period_s

    def restore(self, due_s: float, moved_s: Mapping[Hashable, float]) -> None:
        """Continue from another migrator's state."""
        self._due_s = due_s
        self._moved_s = dict(moved_s)

    def decide(self, now_s: float, view: MigrationView) -> list[Move]:
        """Return the moves to make now; none before the period is over or while the load is even."""
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
    """Return the problem for the replicas that take part: requests go from overloaded to underloaded ones,
    except those in `staying`."""
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
    """Return moves that shorten the predicted makespan, in the order of the requests; may be empty."""
    columns = columns_of(problem)
    place_N = solve_relaxed(columns).place_N
    moved = np.flatnonzero(place_N != columns.source_N).tolist()
    requests, replicas = problem.requests, problem.replicas
    return [
        Move(requests[i].request_id, requests[i].replica, replicas[place].replica)
        for i, place in zip(moved, place_N[moved].tolist(), strict=True)
    ]
