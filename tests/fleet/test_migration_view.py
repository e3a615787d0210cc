"""The fleet's view in the form that migration needs: memory in use, and the cost of a move."""

from __future__ import annotations

import pytest
from fleet_views import ELSEWHERE_S, HOST_S, fleet_of, request_of

from loraplex.fleet.migration.columns import columns_of
from loraplex.fleet.migration.fleet_view import FleetMigrationView
from loraplex.fleet.migration.migrate import problem_of
from loraplex.fleet.migration.trigger import UnevenReplicas


def test_the_kv_in_use_is_that_of_tokens_so_far() -> None:
    """Neither waiting requests nor expected output are in the cache; a request that has ended meanwhile no
    longer is."""
    fleet = fleet_of(2)  # of 4096 KV tokens each
    fleet.send(request_of(0, 1000), 0, is_running=True)
    fleet.send(request_of(1, 2000), 0, is_running=True)
    fleet.send(request_of(2, 4000), 0)
    fleet.send(request_of(3, 500), 1, is_running=True)
    view = FleetMigrationView(fleet.view, {0: 24, 1: 24, 2: 0, 3: None}.__getitem__)
    assert view.kv_share.tolist() == [3048 / 4096, 0.0]


def test_a_request_that_moved_counts_each_token_once() -> None:
    fleet = fleet_of(2)
    fleet.send(request_of(0, 1000), 0, is_running=True)
    fleet.view.load.moved(0, 1, 24)
    fleet.view.load.first_token(0)
    assert FleetMigrationView(fleet.view, lambda request_id: 30).kv_share.tolist() == [0.0, 1030 / 4096]


def test_an_adapter_is_fetched_only_where_the_host_lacks_it() -> None:
    fleet = fleet_of(4)
    fleet.send(request_of(0), 0)
    fleet.view.tiers.loaded(0, 0)
    fleet.view.tiers.loaded(1, 0)
    fleet.view.tiers.staged(2, 0)
    view = FleetMigrationView(fleet.view, lambda request_id: 0)
    problem = problem_of(UnevenReplicas(overloaded=(0,), underloaded=(1, 2, 3)), view)
    load_s = columns_of(problem).load_KR[0] - problem.costs.eta_s
    assert load_s.tolist() == pytest.approx([0.0, 0.0, HOST_S, HOST_S + ELSEWHERE_S])
