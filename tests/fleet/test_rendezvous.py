"""Rendezvous hashing with bounded loads."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from examples import examples
from fleet_views import REQUESTS, Fleet, candidates_of, fleet_of, fleets, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.rendezvous import BOUND, RendezvousRouter, pair_weights


@settings(max_examples=examples(20, 40))
@given(fleets(), REQUESTS)
def test_the_heaviest_replica_below_the_bound_is_taken(fleet: Fleet, request: RoutedRequest) -> None:
    candidates = candidates_of(fleet, request)
    requests = {replica: len(fleet.requests(replica)) for replica in candidates}
    chosen = RendezvousRouter().choose(request, fleet.view)
    if request.adapter is None:
        assert requests[chosen] == min(requests.values())
        return
    most = BOUND * (sum(requests.values()) + 1) / len(candidates)
    below = [replica for replica in candidates if requests[replica] + 1 <= math.ceil(most)]
    weights = {replica: pair_weights(request.adapter, np.array([replica]))[0] for replica in below}
    assert chosen == max(weights, key=lambda replica: weights[replica])


@settings(max_examples=25)
@given(st.integers(2, 40), st.data())
def test_removing_a_replica_moves_only_its_adapters(num_replicas: int, data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, num_replicas - 1))
    fleet, router = fleet_of(num_replicas), RendezvousRouter()
    adapters = [RoutedRequest(adapter, 8, 1) for adapter in range(60)]
    before = [router.choose(each, fleet.view) for each in adapters]
    fleet.view.load.accepts[gone] = False
    after = [router.choose(each, fleet.view) for each in adapters]
    assert gone not in after
    for old, new in zip(before, after, strict=True):
        assert new == old or old == gone
    fleet.view.load.accepts[gone] = True
    assert [router.choose(each, fleet.view) for each in adapters] == before


@pytest.mark.parametrize("bound", [1.0, 1.25, 2.0])
def test_no_replica_exceeds_the_bound(bound: float) -> None:
    """This holds even if all requests are for one adapter."""
    fleet, router = fleet_of(7), RendezvousRouter(bound)
    for number in range(1, 120):
        replica = router.choose(request_of(0), fleet.view)
        fleet.send(request_of(0), replica)
        assert fleet.view.load.everything.num_requests[replica] <= math.ceil(bound * number / 7)


def test_a_bound_below_the_mean_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="below the bound"):
        RendezvousRouter(0.9)


def test_adapters_are_spread_evenly() -> None:
    fleet, router = fleet_of(10), RendezvousRouter()
    homes = Counter(router.choose(RoutedRequest(adapter, 8, 1), fleet.view) for adapter in range(5000))
    assert all(400 < homes[replica] < 600 for replica in range(10))


def test_weights_lie_between_zero_and_one_and_differ() -> None:
    weights = np.concatenate([pair_weights(adapter, np.arange(100)) for adapter in range(100)])
    assert ((weights >= 0) & (weights < 1)).all()
    assert len(np.unique(weights)) == weights.size
    assert weights.mean() == pytest.approx(0.5, abs=0.02)
