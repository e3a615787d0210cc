"""dLoRA's relaxed program: requests may be split between replicas, and memory beyond a capacity is swapped.

    minimise  max_j run_s(j) + a small share of sum_j run_s(j)
    run_s(j)  seconds of the requests that stay and that come, eta and loads of its adapters, swaps(j)
    x_ij      share of request i that goes to another replica j, the rest of it stays           real
    y_kj      whether replica j has requests of adapter k: n_kj y_kj >= requests of k there     binary
    swaps(j)  >= swap_s_per_token x (KV tokens and adapters there - capacity), and zero at least

A request that cannot move has no column, and neither has the share that stays: the solver starts from the
solution in which nothing moves. Small programs are solved with binary y. For eight replicas that takes
seconds, so larger ones are solved as two linear programs. In the first, y is real: it is the share of the
n_kj requests that are there, and every request pays its part of the adapter. Its result says which adapters
are worth having where, and the second program pays for exactly these in full.

Finally each request goes to the replica with its largest share, and the result is compared with staying.

Shape letters: N requests, R replicas, K adapters, P pairs of a request and another replica it may go to, Y
pairs of an adapter and a replica.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from loraplex.core.arrays import BoolArray, FloatArray, IntArray
from loraplex.fleet.migration.columns import TOTAL_WEIGHT, Columns, RunTime
from loraplex.fleet.migration.program import Program, solve

# With up to this many pairs, binary y takes some tens of milliseconds. dLoRA's own setting, two replicas, is
# below the limit while the overloaded one has no more requests than this.
MAX_BINARY_PAIRS = 100
# Rounding loses more than this gap, so closing it further is wasted time. Small programs end at the first
# node.
RELATIVE_GAP = 1e-3
MAX_NODES = 100
# Shares that differ by less than this count as equal: the solver's precision is about the same.
SHARE_TOLERANCE = 1e-6
# A relative gain in makespan below this comes from rounding only.
GAIN_TOLERANCE = 1e-9

_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class RelaxedPlacement:
    """The result of a migration. `place_N`: the place of each request. `bound_s`: no placement has a smaller
    objective."""

    place_N: IntArray
    run_time: RunTime
    bound_s: float


def solve_relaxed(columns: Columns, *, max_binary_pairs: int = MAX_BINARY_PAIRS) -> RelaxedPlacement:
    """Return the best placement found; it is never worse than staying, in makespan or in the objective."""
    stay = columns.source_N
    staying = columns.run_time(stay)
    pairs = _pairs_of(columns)
    if not len(pairs.request_P):
        return RelaxedPlacement(place_N=stay, run_time=staying, bound_s=staying.objective_s)
    solved = _solve_binary(columns, pairs) if len(pairs.request_P) <= max_binary_pairs else None
    bound_s, candidates = solved or _solve_linear(columns, pairs)
    best, best_time = stay, staying
    must_beat_s = staying.makespan_s * (1 - GAIN_TOLERANCE)
    for place_N in candidates:
        run_time = columns.run_time(place_N)
        gains = run_time.makespan_s < must_beat_s and run_time.objective_s < best_time.objective_s
        if gains and columns.is_allowed(place_N):
            best, best_time = place_N, run_time
    return RelaxedPlacement(place_N=best, run_time=best_time, bound_s=bound_s)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The requests that may move, and where to.

    `settled_KR`: adapters that a replica needs wherever the requests go. `most_KR`: most requests for an
    adapter that a replica can have; zero where the adapter is settled.
    """

    request_P: IntArray
    target_P: IntArray
    settled_KR: BoolArray
    most_KR: IntArray


def _pairs_of(columns: Columns) -> _Pairs:
    away_NR = columns.may_go_NR.copy()
    away_NR[np.arange(len(away_NR)), columns.source_N] = False
    request_P, target_P = (each.astype(np.int64) for each in np.nonzero(away_NR))
    has_adapter_N = columns.adapter_N >= 0
    settled_N = has_adapter_N & ~away_NR.any(axis=1)
    settled_KR = np.zeros(columns.load_KR.shape, np.bool_)
    settled_KR[columns.adapter_N[settled_N], columns.source_N[settled_N]] = True
    most_KR = columns.count_adapters(columns.source_N)
    linked_P = has_adapter_N[request_P]
    np.add.at(most_KR, (columns.adapter_N[request_P[linked_P]], target_P[linked_P]), 1)
    return _Pairs(request_P, target_P, settled_KR, np.where(settled_KR, 0, most_KR))


def _solve_binary(columns: Columns, pairs: _Pairs) -> tuple[float, list[IntArray]] | None:
    """Return the bound and the rounded placement with binary y, or None if MAX_NODES found no solution."""
    base = _Base(columns, pairs, paid_KR=pairs.settled_KR, part_KR=np.zeros(pairs.most_KR.shape))
    _add_binary_adapters(base, columns, pairs)
    solution = solve(base.program, relative_gap=RELATIVE_GAP, max_nodes=MAX_NODES)
    if solution is None:
        return None
    return solution.bound, [_rounded(columns, pairs, solution.values[base.x_P])]


def _solve_linear(columns: Columns, pairs: _Pairs) -> tuple[float, list[IntArray]]:
    """Return the bound of the first linear program, and the rounded placements of both."""
    part_KR = np.where(pairs.most_KR > 0, 1.0 / np.maximum(pairs.most_KR, 1), 0.0)
    base = _Base(columns, pairs, paid_KR=pairs.settled_KR, part_KR=part_KR)
    first = solve(base.program)
    assert first is not None, "that nothing moves is a solution"
    place_N = _rounded(columns, pairs, first.values[base.x_P])

    here_KR = columns.needs_adapters(columns.source_N)
    opened_KR = _opened(columns, here_KR, place_N)
    closed_KR = ~(here_KR | opened_KR)
    open_P = ~_looked_up(closed_KR, columns.adapter_N[pairs.request_P], pairs.target_P)
    left = replace(pairs, request_P=pairs.request_P[open_P], target_P=pairs.target_P[open_P])
    base = _Base(columns, left, paid_KR=pairs.settled_KR | opened_KR, part_KR=np.where(here_KR, part_KR, 0.0))
    second = solve(base.program)
    assert second is not None, "that nothing moves is still a solution"
    return first.bound, [place_N, _rounded(columns, left, second.values[base.x_P])]


class _Base:
    """The program without y.

    `paid_KR`: the adapters that a replica pays for, however many requests for them it has. `part_KR`: the
    part of an adapter that each of its requests pays instead.
    """

    def __init__(self, columns: Columns, pairs: _Pairs, *, paid_KR: BoolArray, part_KR: FloatArray) -> None:
        request_P, source_P = pairs.request_P, columns.source_N[pairs.request_P]
        adapter_P, num_replicas = columns.adapter_N[request_P], columns.num_replicas
        come_P = _looked_up(part_KR, adapter_P, pairs.target_P)
        leave_P = _looked_up(part_KR, adapter_P, source_P)
        here_KR = paid_KR + part_KR * columns.count_adapters(columns.source_N)
        self.program = program = Program()

        load_KR = part_KR * columns.load_KR
        move_s_P = columns.move_s_N[request_P] + _looked_up(load_KR, adapter_P, pairs.target_P)
        stay_s_P = columns.stay_s_N[request_P] + _looked_up(load_KR, adapter_P, source_P)
        base_s_R = np.bincount(columns.source_N, weights=columns.stay_s_N, minlength=num_replicas)
        run_s_R = base_s_R + (columns.load_KR * here_KR).sum(axis=0)
        program.offset = TOTAL_WEIGHT * float(run_s_R.sum())
        self.x_P = program.add_columns(len(request_P), upper=1.0, cost=TOTAL_WEIGHT * (move_s_P - stay_s_P))
        swap_s_R = program.add_columns(num_replicas, cost=TOTAL_WEIGHT)
        makespan_s = program.add_columns(1, cost=1.0)
        self.run_R = self._add_flow(pairs.target_P, source_P, come=move_s_P, leave=stay_s_P, upper_R=-run_s_R)
        program.add_entries(self.run_R, swap_s_R, 1.0)
        program.add_entries(self.run_R, np.repeat(makespan_s, num_replicas), -1.0)

        # Swaps are counted in seconds, so that the coefficients of all rows have similar magnitude.
        second, tokens_K = columns.swap_s_per_token, columns.adapter_tokens_K
        request_tokens_P, tokens_KR = columns.kv_tokens_N[request_P], part_KR * tokens_K[:, None]
        come_tokens_P = request_tokens_P + _looked_up(tokens_KR, adapter_P, pairs.target_P)
        leave_tokens_P = request_tokens_P + _looked_up(tokens_KR, adapter_P, source_P)
        tokens_R = np.bincount(columns.source_N, weights=columns.kv_tokens_N, minlength=num_replicas)
        room_R = columns.capacity_R - tokens_R - tokens_K @ here_KR
        self.swap_R = self._add_flow(
            pairs.target_P,
            source_P,
            come=second * come_tokens_P,
            leave=second * leave_tokens_P,
            upper_R=second * room_R,
        )
        program.add_entries(self.swap_R, swap_s_R, -1.0)

        free_R = columns.max_adapters_R - here_KR.sum(axis=0)
        self.limit_R = self._add_flow(pairs.target_P, source_P, come=come_P, leave=leave_P, upper_R=free_R)
        self._add_whole_requests(request_P, len(columns.source_N))

    def _add_flow(
        self,
        target_P: IntArray,
        source_P: IntArray,
        *,
        come: FloatArray,
        leave: FloatArray,
        upper_R: FloatArray,
    ) -> IntArray:
        """Add a row for each replica: incoming requests add to it, and leaving ones subtract from it."""
        rows_R = self.program.add_rows(len(upper_R), upper=upper_R)
        self.program.add_entries(rows_R[target_P], self.x_P, come)
        self.program.add_entries(rows_R[source_P], self.x_P, -leave)
        return rows_R

    def _add_whole_requests(self, request_P: IntArray, num_requests: int) -> None:
        """Limit the shares of each request to a sum of one; a single share is bounded by its column."""
        several_N = np.bincount(request_P, minlength=num_requests) > 1
        row_N = np.zeros(num_requests, np.int64)
        row_N[several_N] = self.program.add_rows(int(several_N.sum()), upper=1.0)
        several_P = several_N[request_P]
        self.program.add_entries(row_N[request_P[several_P]], self.x_P[several_P], 1.0)


def _add_binary_adapters(base: _Base, columns: Columns, pairs: _Pairs) -> None:
    """Add y, with the constraint that a replica with requests for an adapter needs the adapter (one row for
    all of them)."""
    program, here_KR = base.program, columns.count_adapters(columns.source_N)
    adapter_Y, replica_Y = np.nonzero(pairs.most_KR)
    load_s_Y = columns.load_KR[adapter_Y, replica_Y]
    y_Y = program.add_columns(len(load_s_Y), upper=1.0, cost=TOTAL_WEIGHT * load_s_Y, integer=True)
    program.add_entries(base.run_R[replica_Y], y_Y, load_s_Y)
    swapped_s_K = columns.swap_s_per_token * columns.adapter_tokens_K.astype(np.float64)
    program.add_entries(base.swap_R[replica_Y], y_Y, swapped_s_K[adapter_Y])
    program.add_entries(base.limit_R[replica_Y], y_Y, 1.0)
    row_Y = program.add_rows(len(y_Y), upper=-here_KR[adapter_Y, replica_Y].astype(np.float64))
    program.add_entries(row_Y, y_Y, -pairs.most_KR[adapter_Y, replica_Y].astype(np.float64))
    row_KR = np.full(here_KR.shape, -1, np.int64)
    row_KR[adapter_Y, replica_Y] = row_Y
    linked_P = columns.adapter_N[pairs.request_P] >= 0
    request_P, x_P = pairs.request_P[linked_P], base.x_P[linked_P]
    adapter_P = columns.adapter_N[request_P]
    for replica_P, value in ((pairs.target_P[linked_P], 1.0), (columns.source_N[request_P], -1.0)):
        row_P = row_KR[adapter_P, replica_P]
        open_P = row_P >= 0
        program.add_entries(row_P[open_P], x_P[open_P], value)


def _looked_up(
    table_KR: npt.NDArray[_Value], adapter_P: IntArray, replica_P: IntArray
) -> npt.NDArray[_Value]:
    """Return the table's values for pairs; zero or False for the base model."""
    values_P = np.zeros(len(adapter_P), table_KR.dtype)
    linked_P = adapter_P >= 0
    values_P[linked_P] = table_KR[adapter_P[linked_P], replica_P[linked_P]]
    return values_P


def _rounded(columns: Columns, pairs: _Pairs, x_P: FloatArray) -> IntArray:
    """Return the replica with the largest share of each request; on a tie its own, then the first."""
    share_NR = np.zeros(columns.may_go_NR.shape)
    share_NR[pairs.request_P, pairs.target_P] = x_P
    here_N = 1.0 - share_NR.sum(axis=1)
    largest_N = share_NR.max(axis=1)
    target_N = (share_NR >= largest_N[:, None] - SHARE_TOLERANCE).argmax(axis=1)
    return np.where(largest_N > here_N + SHARE_TOLERANCE, target_N, columns.source_N).astype(np.int64)


def _opened(columns: Columns, here_KR: BoolArray, place_N: IntArray) -> BoolArray:
    """Return the adapters that come to replicas which have no requests for them yet.

    If more would come than a replica may hold, those with the most requests come.
    """
    wanted_KR = np.where(here_KR, 0, columns.count_adapters(place_N))
    room_R = columns.max_adapters_R - here_KR.sum(axis=0)
    order_KR = np.argsort(np.argsort(-wanted_KR, axis=0, kind="stable"), axis=0, kind="stable")
    opened_KR: BoolArray = (wanted_KR > 0) & (order_KR < room_R[None, :])
    return opened_KR
