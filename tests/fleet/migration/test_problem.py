from __future__ import annotations

import math
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given, settings
from migration_problems import (
    all_placements,
    costs,
    relaxed_objective,
    replicas,
    request,
    tiny_problems,
)

from loraplex.core.errors import UserError
from loraplex.fleet.migration.columns import columns_of
from loraplex.fleet.migration.migration_factor import MigrationFactor
from loraplex.fleet.migration.problem import MigrationAdapter, MigrationProblem

GOOD = MigrationProblem(
    replicas=replicas(2),
    requests=(request(0, 0, adapter=3), request(1, 1)),
    adapters=(MigrationAdapter(adapter=3, load_s=0.1),),
    costs=costs(),
)
FIRST = GOOD.replicas[0]
ADAPTER = GOOD.adapters[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": ()}, "no replicas to migrate between"),
        ({"replicas": (FIRST,)}, "request 1 is on replica 1, which does not take part; the replica here: 0"),
        ({"replicas": (FIRST, FIRST)}, "replica 0 is there twice"),
        ({"replicas": (replace(FIRST, kv_capacity_tokens=0),)}, "replica 0 has room for 0 KV tokens"),
        ({"replicas": (replace(FIRST, max_adapters=0),)}, "replica 0 may hold 0 adapters"),
        ({"replicas": (replace(FIRST, host_kv_tokens=-1),)}, "the host of replica 0 has negative room"),
        ({"adapters": ()}, "request 0 needs adapter 3, of which nothing is known; the adapters here: none"),
        ({"adapters": (ADAPTER, ADAPTER)}, "adapter 3 is there twice"),
        ({"adapters": (replace(ADAPTER, load_s=math.inf),)}, "the time to load adapter 3 is inf s"),
        ({"adapters": (replace(ADAPTER, kv_tokens=-1),)}, "adapter 3 takes -1 KV tokens"),
        ({"requests": (request(0, 0), request(0, 1))}, "request 0 is there twice"),
        ({"requests": (request(0, 0, tokens=-2),)}, "request 0 has -2 KV tokens"),
        ({"requests": (request(0, 0, seconds=math.nan),)}, "the expected time of request 0 is nan s"),
        ({"costs": costs(gamma=0.9)}, "gamma is 0.9; it is time with migration over time without"),
        ({"costs": costs(eta_s=-1.0)}, "eta, the time for each adapter of a replica, is -1 s"),
        ({"costs": costs(swap_s_per_token=math.inf)}, "the time to swap a token is inf s"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(GOOD, **change)


@settings(max_examples=examples(25, 50))
@given(tiny_problems())
def test_the_run_time_of_a_placement_is_its_sum_in_plain_python(problem: MigrationProblem) -> None:
    columns = columns_of(problem)
    for placement in list(all_placements(problem))[:10]:
        place_N = columns.source_N.copy()
        place_N[:] = placement
        assert columns.run_time(place_N).objective_s == pytest.approx(relaxed_objective(problem, placement))
        assert columns.is_allowed(place_N)


def test_migrations_raise_gamma() -> None:
    factor = MigrationFactor()
    assert factor.gamma == 1.0
    factor.record_migration(1.0)
    assert factor.gamma == 1.0, "there is nothing yet to compare the migration with"
    factor.record_execution(10.0)
    assert factor.gamma == pytest.approx(1.1)
    with pytest.raises(UserError, match="cannot be counted"):
        factor.record_execution(-1.0)
