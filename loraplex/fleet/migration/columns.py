"""A migration problem as arrays, and the run time of the replicas for a placement of the requests.

Shape letters: N requests, R replicas, K adapters. A placement is an array of N places: positions in
`problem.replicas`, not the replicas' numbers. The objective is defined here; the programs write the same sums
as coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loraplex.core.arrays import BoolArray, FloatArray, IntArray
from loraplex.fleet.migration.problem import MigrationProblem, MigrationRequest

# Of two placements with the same makespan, the one with less total work is better. Without this share of the
# total in the objective, requests would also move between replicas that do not determine the makespan.
TOTAL_WEIGHT = 1e-3


class RunTime(NamedTuple):
    """The time at which the last replica finishes its requests, and the total work of all replicas."""

    makespan_s: float
    total_s: float

    @property
    def objective_s(self) -> float:
        """The objective that every program of this package minimises."""
        return self.makespan_s + TOTAL_WEIGHT * self.total_s


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a problem.

    `adapter_N` is -1 for the base model, because it is used as an index. `load_KR`: seconds that it costs a
    replica to have requests for an adapter, including eta. `max_adapters_R`: a replica that has requests for
    more adapters than it may hold keeps them, so that staying is always possible; it takes no further ones.
    """

    source_N: IntArray
    adapter_N: IntArray
    kv_tokens_N: IntArray
    stay_s_N: FloatArray
    move_s_N: FloatArray
    may_go_NR: BoolArray
    load_KR: FloatArray
    adapter_tokens_K: IntArray
    capacity_R: IntArray
    max_adapters_R: IntArray
    swap_s_per_token: float

    @property
    def num_replicas(self) -> int:
        return len(self.capacity_R)

    @property
    def num_adapters(self) -> int:
        return len(self.adapter_tokens_K)

    def count_adapters(self, place_N: IntArray) -> IntArray:
        """Return how many requests for each adapter each replica has."""
        has = self.adapter_N >= 0
        flat = self.adapter_N[has] * self.num_replicas + place_N[has]
        counted = np.bincount(flat, minlength=self.num_adapters * self.num_replicas)
        return counted.reshape(self.num_adapters, self.num_replicas).astype(np.int64)

    def needs_adapters(self, place_N: IntArray) -> BoolArray:
        """Return whether each replica has requests for each adapter."""
        return self.count_adapters(place_N) > 0

    def run_time(self, place_N: IntArray) -> RunTime:
        """Return the predicted run time; tokens beyond a replica's capacity cost swapping each."""
        num_replicas = self.num_replicas
        seconds_N = np.where(place_N == self.source_N, self.stay_s_N, self.move_s_N)
        needs_KR = self.needs_adapters(place_N)
        tokens_R = np.bincount(place_N, weights=self.kv_tokens_N, minlength=num_replicas)
        beyond_R = np.maximum(tokens_R + self.adapter_tokens_K @ needs_KR - self.capacity_R, 0)
        seconds_R = np.bincount(place_N, weights=seconds_N, minlength=num_replicas)
        seconds_R = seconds_R + (self.load_KR * needs_KR).sum(axis=0) + self.swap_s_per_token * beyond_R
        return RunTime(float(seconds_R.max()), float(seconds_R.sum()))

    def is_allowed(self, place_N: IntArray) -> bool:
        """Return whether every request may go to its place, and no replica needs too many adapters."""
        goes = self.may_go_NR[np.arange(len(place_N)), place_N]
        return bool(goes.all() and (self.needs_adapters(place_N).sum(axis=0) <= self.max_adapters_R).all())


def columns_of(problem: MigrationProblem) -> Columns:
    """Return a problem as arrays."""
    costs, replicas, requests = problem.costs, problem.replicas, problem.requests
    place = {replica.replica: index for index, replica in enumerate(replicas)}
    adapter_index = {adapter.adapter: index for index, adapter in enumerate(problem.adapters)}
    source_N = np.array([place[each.replica] for each in requests], np.int64)
    expected_s_N = np.array([each.expected_s for each in requests], np.float64)
    prefill_s_N = np.array([costs.prefill.seconds(each.kv_tokens) for each in requests], np.float64)
    gives_R = np.array([each.gives for each in replicas], np.bool_)
    receives_R = np.array([each.receives for each in replicas], np.bool_)
    leaves_N = gives_R[source_N] & ~np.array([each.stays for each in requests], np.bool_)
    may_go_NR = leaves_N[:, None] & receives_R[None, :]
    may_go_NR[np.arange(len(requests)), source_N] = True
    load_KR = np.full((len(adapter_index), len(replicas)), costs.eta_s)
    for adapter, k in adapter_index.items():
        costs_of = problem.adapters[k]
        for r, replica in enumerate(replicas):
            if adapter not in replica.adapters:
                load_KR[k, r] += costs_of.load_s
                load_KR[k, r] += 0.0 if replica.replica in costs_of.on_host else costs_of.fetch_s
    columns = Columns(
        source_N=source_N,
        adapter_N=np.array([_index(adapter_index, each) for each in requests], np.int64),
        kv_tokens_N=np.array([each.kv_tokens for each in requests], np.int64),
        stay_s_N=expected_s_N,
        move_s_N=costs.gamma * expected_s_N + prefill_s_N,
        may_go_NR=may_go_NR,
        load_KR=load_KR,
        adapter_tokens_K=np.array([each.kv_tokens for each in problem.adapters], np.int64),
        capacity_R=np.array([each.kv_capacity_tokens for each in replicas], np.int64),
        max_adapters_R=np.array([_limit(each.max_adapters, adapter_index) for each in replicas], np.int64),
        swap_s_per_token=costs.swap_s_per_token,
    )
    np.maximum(
        columns.max_adapters_R, columns.needs_adapters(source_N).sum(axis=0), out=columns.max_adapters_R
    )
    return columns


def _index(adapter_index: dict[int, int], request: MigrationRequest) -> int:
    return -1 if request.adapter is None else adapter_index[request.adapter]


def _limit(max_adapters: int | None, adapter_index: dict[int, int]) -> int:
    return len(adapter_index) if max_adapters is None else max_adapters
