"""The replicas that a router may choose from, and the location of adapters."""

from __future__ import annotations

import numpy as np
import pytest
from examples import examples
from fleet_views import ELSEWHERE_S, HOST_S, Fleet, candidates_of, fleet_of, fleets, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.errors import CapacityError
from loraplex.fleet.plan import Plan
from loraplex.fleet.tiers import AdapterTiers

PLAN = Plan.with_equal_shares([[0, 1], [2], *[[0, 1, 2, 3]] * 6])


@settings(max_examples=examples(20, 40))
@given(fleets())
def test_candidates_equal_a_plain_filter(fleet: Fleet) -> None:
    for adapter in (None, *range(8)):
        request = request_of(adapter)
        assert fleet.view.candidates(request).tolist() == candidates_of(fleet, request)


def test_a_plan_limits_candidates_but_not_those_of_the_base_model() -> None:
    view = fleet_of(4, plan=PLAN).view
    assert view.candidates(request_of(0)).tolist() == [0, 1]
    assert view.candidates(request_of(1)).tolist() == [2]
    assert view.candidates(request_of(None)).tolist() == [0, 1, 2, 3]


def test_where_all_replicas_of_an_adapter_are_down_any_other_serves_it() -> None:
    view = fleet_of(4, plan=PLAN, down=[0]).view
    assert view.candidates(request_of(0)).tolist() == [1]
    view.load.accepts[1] = False
    assert view.candidates(request_of(0)).tolist() == [2, 3]
    view.load.accepts[:] = False
    with pytest.raises(CapacityError, match="no replica of the fleet accepts requests now"):
        view.candidates(request_of(0))


@settings(max_examples=examples(20, 40))
@given(fleets(), st.integers(0, 7))
def test_an_adapter_is_loaded_from_the_nearest_tier(fleet: Fleet, adapter: int) -> None:
    view = fleet.view
    candidates = view.candidates(request_of(adapter))
    expected = []
    for replica in candidates.tolist():
        if replica in view.tiers.on_device(adapter):
            expected.append(0.0)
        elif replica in view.tiers.on_host(adapter):
            expected.append(HOST_S)
        else:
            expected.append(HOST_S + ELSEWHERE_S)
    assert view.load_s(request_of(adapter), candidates).tolist() == expected
    assert not view.load_s(request_of(None), candidates).any()


@settings(max_examples=examples(25, 50))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["loaded", "evicted", "staged", "dropped"]), st.integers(0, 2), st.integers(0, 2)
        )
    )
)
def test_tiers_hold_what_was_reported_last(reports: list[tuple[str, int, int]]) -> None:
    tiers = AdapterTiers()
    on_device, on_host = set(), set()
    for report, replica, adapter in reports:
        getattr(tiers, report)(replica, adapter)
        held = on_device if report in ("loaded", "evicted") else on_host
        (held.add if report in ("loaded", "staged") else held.discard)((replica, adapter))
    pairs = np.ndindex(3, 3)
    for replica, adapter in pairs:
        assert (replica in tiers.on_device(adapter)) == ((replica, adapter) in on_device)
        assert (replica in tiers.on_host(adapter)) == ((replica, adapter) in on_host)
