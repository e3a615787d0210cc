"""dLoRA's full integer program: each request is whole, on one replica, with its KV cache in device or host
memory.

    minimise  max_j run_s(j) + a small share of sum_j run_s(j)
    run_s(j) = sum_i (seconds_ij (xG_ij + xH_ij) + swap_s_per_token M^R_i xH_ij) + sum_k (eta + load_kj) y_kj
    sum_j xG_ij + xH_ij = 1                           each request is somewhere
    y_kj >= xG_ij + xH_ij                             for the adapter k of each request i
    sum_i M^R_i xG_ij + sum_k M^A_k y_kj <= M^G_j     device memory
    sum_i M^R_i xH_ij <= M^H_j                        host memory
    sum_k y_kj <= adapters that j may hold

It is the reference for small problems: its time grows exponentially, and a few dozen requests take seconds.
Shape letters as in relaxed.py; here P are the pairs of a request and any replica it may be on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.core.errors import CapacityError
from loraplex.fleet.migration.columns import TOTAL_WEIGHT, columns_of
from loraplex.fleet.migration.problem import MigrationProblem
from loraplex.fleet.migration.program import Program, solve


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactPlacement:
    """The best placement. `swapped`: the requests that have their KV cache in host memory."""

    place_N: IntArray
    swapped: frozenset[int]
    makespan_s: float
    objective_s: float


def solve_exact(problem: MigrationProblem) -> ExactPlacement:
    """Return a placement with the smallest objective. Raises CapacityError if none fits the memory."""
    columns = columns_of(problem)
    request_P, replica_P = (each.astype(np.int64) for each in np.nonzero(columns.may_go_NR))
    program = Program()
    tokens_P = columns.kv_tokens_N[request_P].astype(np.float64)
    stays_P = replica_P == columns.source_N[request_P]
    device_s_P = np.where(stays_P, columns.stay_s_N[request_P], columns.move_s_N[request_P])
    host_s_P = device_s_P + columns.swap_s_per_token * tokens_P
    device_P = program.add_columns(len(request_P), upper=1.0, cost=TOTAL_WEIGHT * device_s_P, integer=True)
    host_P = program.add_columns(len(request_P), upper=1.0, cost=TOTAL_WEIGHT * host_s_P, integer=True)
    adapter_Y, replica_Y = (each.ravel() for each in np.indices(columns.load_KR.shape))
    load_s_Y = columns.load_KR.ravel()
    y_Y = program.add_columns(len(load_s_Y), upper=1.0, cost=TOTAL_WEIGHT * load_s_Y, integer=True)
    makespan_s = program.add_columns(1, cost=1.0)

    somewhere = program.add_rows(len(columns.source_N), lower=1.0, upper=1.0)
    linked_P = np.flatnonzero(columns.adapter_N[request_P] >= 0)
    links = program.add_rows(len(linked_P), upper=0.0)
    runs = program.add_rows(columns.num_replicas, upper=0.0)
    device = program.add_rows(columns.num_replicas, upper=columns.capacity_R.astype(np.float64))
    host = program.add_rows(columns.num_replicas, upper=_host_tokens(problem))
    for x_P, seconds_P, memory in ((device_P, device_s_P, device), (host_P, host_s_P, host)):
        program.add_entries(somewhere[request_P], x_P, 1.0)
        program.add_entries(links, x_P[linked_P], 1.0)
        program.add_entries(runs[replica_P], x_P, seconds_P)
        program.add_entries(memory[replica_P], x_P, tokens_P)
    adapters_P = columns.adapter_N[request_P][linked_P] * columns.num_replicas + replica_P[linked_P]
    program.add_entries(links, y_Y[adapters_P], -1.0)
    program.add_entries(runs[replica_Y], y_Y, load_s_Y)
    program.add_entries(runs, np.repeat(makespan_s, columns.num_replicas), -1.0)
    program.add_entries(device[replica_Y], y_Y, columns.adapter_tokens_K[adapter_Y].astype(np.float64))
    limits = program.add_rows(columns.num_replicas, upper=columns.max_adapters_R.astype(np.float64))
    program.add_entries(limits[replica_Y], y_Y, 1.0)

    solution = solve(program)
    if solution is None:
        raise CapacityError("no placement of the requests fits the memory of the replicas and their hosts")
    on_device_P, on_host_P = solution.values[device_P] > 0.5, solution.values[host_P] > 0.5
    chosen_P = on_device_P | on_host_P
    place_N = np.full(len(columns.source_N), -1, np.int64)
    place_N[request_P[chosen_P]] = replica_P[chosen_P]
    return ExactPlacement(
        place_N=place_N,
        swapped=frozenset(request_P[on_host_P].tolist()),
        makespan_s=float(solution.values[makespan_s[0]]),
        objective_s=solution.objective,
    )


def _host_tokens(problem: MigrationProblem) -> FloatArray:
    tokens = [each.host_kv_tokens for each in problem.replicas]
    return np.array([np.inf if each is None else each for each in tokens], np.float64)
