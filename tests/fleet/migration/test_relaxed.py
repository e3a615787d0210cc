from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from migration_problems import (
    all_placements,
    best_exact_objective,
    costs,
    exact_objective,
    large_problem,
    relaxed_objective,
    replicas,
    request,
    stay_placement,
    tiny_problems,
)

from loraplex.fleet.migration.columns import columns_of
from loraplex.fleet.migration.problem import MigrationAdapter, MigrationProblem
from loraplex.fleet.migration.relaxed import MAX_BINARY_PAIRS, solve_relaxed

# Small programs are solved with binary y; without room for a pair they are solved as linear programs.
binary_or_linear = st.sampled_from([MAX_BINARY_PAIRS, 0])


@settings(max_examples=examples(30, 60))
@given(tiny_problems(), binary_or_linear)
def test_the_bound_is_below_and_the_rounded_placement_above_the_best(
    problem: MigrationProblem, max_binary_pairs: int
) -> None:
    best = best_exact_objective(problem)
    found = solve_relaxed(columns_of(problem), max_binary_pairs=max_binary_pairs)
    placement = tuple(found.place_N.tolist())
    assert found.bound_s <= best + 1e-5
    assert exact_objective(problem, placement) >= best - 1e-9
    assert found.bound_s <= found.run_time.objective_s + 1e-5


@settings(max_examples=examples(30, 60))
@given(tiny_problems(), binary_or_linear)
def test_requests_go_only_where_they_may_and_never_for_the_worse(
    problem: MigrationProblem, max_binary_pairs: int
) -> None:
    columns = columns_of(problem)
    found = solve_relaxed(columns, max_binary_pairs=max_binary_pairs)
    placement = tuple(found.place_N.tolist())
    assert placement in set(all_placements(problem))
    assert found.run_time.objective_s == pytest.approx(relaxed_objective(problem, placement))
    staying = columns.run_time(columns.source_N)
    moved = placement != stay_placement(problem)
    assert found.run_time.makespan_s < staying.makespan_s or not moved
    assert found.run_time.objective_s < staying.objective_s or not moved


@settings(max_examples=examples(15, 30))
@given(tiny_problems(), st.sampled_from(["gamma", "eta_s", "swap_s_per_token"]))
def test_the_bound_rises_with_every_price(problem: MigrationProblem, price: str) -> None:
    dearer = replace(problem.costs, **{price: getattr(problem.costs, price) + 0.5})
    cheap = solve_relaxed(columns_of(problem), max_binary_pairs=0)
    dear = solve_relaxed(columns_of(replace(problem, costs=dearer)), max_binary_pairs=0)
    assert dear.bound_s >= cheap.bound_s - 1e-6


@pytest.mark.parametrize("max_binary_pairs", [MAX_BINARY_PAIRS, 0])
def test_half_of_the_equal_requests_of_one_replica_go_to_an_idle_one(max_binary_pairs: int) -> None:
    problem = MigrationProblem(
        replicas=replicas(2), requests=tuple(request(each, 0) for each in range(10)), costs=costs()
    )
    found = solve_relaxed(columns_of(problem), max_binary_pairs=max_binary_pairs)
    assert np.bincount(found.place_N).tolist() == [5, 5]


def test_nothing_moves_between_equally_loaded_replicas() -> None:
    requests = tuple(request(each, each % 3, adapter=each % 2) for each in range(12))
    adapters = tuple(MigrationAdapter(adapter=each, load_s=0.1) for each in range(2))
    problem = MigrationProblem(replicas=replicas(3), requests=requests, adapters=adapters, costs=costs())
    columns = columns_of(problem)
    assert (solve_relaxed(columns).place_N == columns.source_N).all()


@pytest.mark.parametrize("max_binary_pairs", [MAX_BINARY_PAIRS, 0])
def test_requests_go_where_their_adapter_is(max_binary_pairs: int) -> None:
    idle, holder = replicas(2)[1], replace(replicas(3)[2], adapters=frozenset({7}))
    problem = MigrationProblem(
        replicas=(replicas(1)[0], idle, holder),
        requests=(request(0, 0), request(1, 0, adapter=7)),
        adapters=(MigrationAdapter(adapter=7, load_s=0.5),),
        costs=costs(),
    )
    found = solve_relaxed(columns_of(problem), max_binary_pairs=max_binary_pairs)
    assert found.place_N[1] == 2


def test_a_load_that_takes_longer_than_is_gained_moves_nothing() -> None:
    requests = tuple(request(each, 0, adapter=0) for each in range(4))
    held = (replace(replicas(1)[0], adapters=frozenset({0})), replicas(2)[1])
    adapters = (MigrationAdapter(adapter=0, load_s=10.0),)
    problem = MigrationProblem(replicas=held, requests=requests, adapters=adapters, costs=costs())
    columns = columns_of(problem)
    assert (solve_relaxed(columns).place_N == columns.source_N).all()
    cheap = replace(problem, adapters=(MigrationAdapter(adapter=0, load_s=0.1),))
    assert np.bincount(solve_relaxed(columns_of(cheap)).place_N).tolist() == [2, 2]


def test_a_replica_short_of_memory_gives_requests_away() -> None:
    """Both replicas would work equally long, but one of them swaps."""
    problem = MigrationProblem(
        replicas=replicas(2, kv_capacity_tokens=1000),
        requests=tuple(
            [request(each, 0, tokens=400) for each in range(4)] + [request(9, 1, seconds=4.0, tokens=10)]
        ),
        costs=costs(swap_s_per_token=0.01),
    )
    found = solve_relaxed(columns_of(problem))
    assert np.bincount(found.place_N).tolist() in ([2, 3], [3, 2])


@pytest.mark.parametrize("num_adapters", [32, 300])
def test_eight_replicas_and_500_requests_come_close_to_the_bound(num_adapters: int) -> None:
    columns = columns_of(large_problem(0, num_adapters=num_adapters))
    found, again = solve_relaxed(columns), solve_relaxed(columns)
    assert found.run_time.makespan_s < 0.8 * columns.run_time(columns.source_N).makespan_s
    assert found.run_time.objective_s < 1.1 * found.bound_s
    assert (found.place_N == again.place_N).all()


def test_a_limit_on_adapters_holds_in_large_problems() -> None:
    problem = large_problem(1, num_adapters=100)
    limited = replace(problem, replicas=tuple(replace(each, max_adapters=12) for each in problem.replicas))
    columns = columns_of(limited)
    found = solve_relaxed(columns)
    assert columns.is_allowed(found.place_N)
    assert found.run_time.makespan_s < columns.run_time(columns.source_N).makespan_s


def test_without_requests_nothing_is_solved() -> None:
    found = solve_relaxed(columns_of(MigrationProblem(replicas=replicas(2), requests=(), costs=costs())))
    assert found.bound_s == 0.0
    assert len(found.place_N) == 0
