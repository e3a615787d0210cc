from __future__ import annotations

import math
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given, settings
from migration_problems import (
    best_exact_objective,
    costs,
    exact_objective,
    replicas,
    request,
    tiny_problems,
)

from loraplex.core.errors import CapacityError
from loraplex.fleet.migration.exact import solve_exact
from loraplex.fleet.migration.problem import MigrationAdapter, MigrationProblem


@settings(max_examples=examples(25, 50))
@given(tiny_problems())
def test_the_program_finds_what_trying_every_placement_finds(problem: MigrationProblem) -> None:
    best = best_exact_objective(problem)
    if math.isinf(best):
        with pytest.raises(CapacityError, match="no placement of the requests fits"):
            solve_exact(problem)
        return
    found = solve_exact(problem)
    assert found.objective_s == pytest.approx(best, abs=1e-5)
    assert exact_objective(problem, found.place_N.tolist()) == pytest.approx(best, abs=1e-5)


@settings(max_examples=15)
@given(tiny_problems())
def test_higher_prices_never_make_the_best_placement_cheaper(problem: MigrationProblem) -> None:
    problem = replace(
        problem, replicas=tuple(replace(each, host_kv_tokens=None) for each in problem.replicas)
    )
    if math.isinf(best_exact_objective(problem)):
        return
    cheap = solve_exact(problem).objective_s
    for price in ("gamma", "eta_s", "swap_s_per_token"):
        dearer = replace(problem.costs, **{price: getattr(problem.costs, price) + 0.5})
        assert solve_exact(replace(problem, costs=dearer)).objective_s >= cheap - 1e-5


def test_whole_requests_are_swapped() -> None:
    """Five tokens too many: of requests with 6 and 9 tokens the smaller one goes to the host."""
    problem = MigrationProblem(
        replicas=replicas(1, kv_capacity_tokens=10),
        requests=(request(0, 0, tokens=9, seconds=1.0), request(1, 0, tokens=6, seconds=1.0)),
        costs=costs(swap_s_per_token=0.5),
    )
    found = solve_exact(problem)
    assert found.swapped == {1}
    assert found.makespan_s == pytest.approx(2.0 + 6 * 0.5)


def test_adapters_that_fill_the_memory_leave_no_placement() -> None:
    problem = MigrationProblem(
        replicas=replicas(2, kv_capacity_tokens=10),
        requests=(request(0, 0, adapter=0),),
        adapters=(MigrationAdapter(adapter=0, load_s=0.1, kv_tokens=11),),
        costs=costs(),
    )
    with pytest.raises(CapacityError, match="no placement of the requests fits"):
        solve_exact(problem)
