"""Fleets of engines with slots for adapters: each engine does what it does alone, and nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import TRUTH
from test_fleet import RestlessMigrator, check_all_served, times_of
from twins import random_workload

from loraplex.core.errors import CapacityError, UserError
from loraplex.fleet.controller import Controller
from loraplex.fleet.load import FleetLoad
from loraplex.fleet.placements.demand import Demand, extrapolated_demand, mean_demand
from loraplex.fleet.policy import Policy
from loraplex.fleet.replanner import Replanner
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.round_robin import RoundRobinRouter
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.named_profiles import Profile
from loraplex.perf.slot_profile import SlotProfile
from loraplex.twin import fleet_run
from loraplex.twin.fleet import FleetOutcome, SimulatedFleet
from loraplex.twin.fleet_engines import fleet_engines
from loraplex.twin.fleet_run import FleetOptions, FleetRuns, base_times
from loraplex.twin.links import LinkSpeed
from loraplex.twin.operating_points import operating_points
from loraplex.twin.replay import ReplayOptions, longest_of, replay
from loraplex.twin.slo import Slo
from loraplex.workload.jsonl import WorkloadRequest

OPTIONS = ReplayOptions(num_adapters=9, ranks=(8, 16, 64), num_slots=3, kv_tokens=2400)
WORKLOAD = random_workload(3, num_requests=200, num_adapters=9, rps=30.0)
LINK = LinkSpeed(bytes_per_s=2e9)
ADAPTER_BYTES = 80 << 20
FEW_CONNECTIONS = replace(TRUTH, client=replace(TRUTH.client, max_open=5))


def run(
    policy: str,
    *,
    profile: SlotProfile = TRUTH,
    num_replicas: int = 3,
    options: ReplayOptions = OPTIONS,
    workload: Sequence[WorkloadRequest] = WORKLOAD,
    seed: int = 0,
    link: LinkSpeed | None = None,
) -> FleetOutcome:
    chosen = FleetOptions(
        num_replicas=num_replicas,
        replay=options,
        slo=Slo(tpt_s=0.05),
        period_s=0.5,
        link=link,
        adapter_bytes=ADAPTER_BYTES,
    )
    return FleetRuns(profile, workload, chosen).run(Policy.of_name(policy), seed)


@pytest.mark.parametrize("until_s", [math.inf, 4.0])
@pytest.mark.parametrize("profile", [TRUTH, FEW_CONNECTIONS])
@pytest.mark.parametrize("policy", ["most-idle", "routing-table+contiguous"])
def test_a_fleet_of_one_does_what_the_twin_does(policy: str, profile: SlotProfile, until_s: float) -> None:
    options = replace(OPTIONS, until_s=until_s)
    alone = replay(profile, WORKLOAD, options)
    outcome = run(policy, profile=profile, num_replicas=1, options=options)
    assert list(outcome.all.requests) == list(alone.requests)
    assert outcome.all.summary() == alone.summary()
    if until_s == math.inf and profile is TRUTH:
        assert alone.num_loads > 9, "adapters take turns in the slots"
        assert alone.num_preemptions > 0
    if profile is FEW_CONNECTIONS:
        assert any(each.lost for each in alone.requests)


@pytest.mark.parametrize("policy", ["auto", "rank-aware", "affinity"])
def test_a_replica_does_what_it_would_with_its_share_alone(policy: str) -> None:
    outcome = run(policy)
    assert min(each.num_requests for each in outcome.replicas) > 0
    for number in range(3):
        mine = [index for index, chosen in enumerate(outcome.chosen) if chosen == number]
        alone = replay(TRUTH, [WORKLOAD[index] for index in mine], OPTIONS)
        assert times_of([outcome.all.requests[index] for index in mine]) == times_of(alone.requests)
        assert outcome.replicas[number].num_loads == alone.num_loads


def simulate(
    workload: Sequence[WorkloadRequest], migrator: RestlessMigrator | None = None
) -> tuple[FleetOutcome, FleetView]:
    has = fleet_engines(TRUTH, OPTIONS, longest=longest_of(workload))
    view = FleetView(load=FleetLoad([has.limits] * 3), tiers=AdapterTiers(), costs=has.costs, moves=has.moves)
    controller = Controller(adapters=has.adapters, view=view, router=RoundRobinRouter(), migrator=migrator)
    return SimulatedFleet(has.engines, controller).run(workload), view


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), rps=st.sampled_from([20.0, 200.0]))
def test_requests_that_move_lose_no_token(seed: int, rps: float) -> None:
    workload = random_workload(seed, num_requests=40, num_adapters=9, rps=rps)
    outcome, view = simulate(workload, RestlessMigrator(seed, 3, period_s=0.3))
    assert outcome.num_moves > 0
    check_all_served(outcome, workload)
    for column in (*view.load.everything, *view.load.waiting):
        assert not column.any(), "all have ended"
    for each in outcome.all.requests:
        assert each.first_token_s is not None
        assert each.finish_s is not None
        assert each.request.arrival_s < each.first_token_s <= each.finish_s


def test_lost_requests_are_no_load() -> None:
    """Requests that clients had no connection for are in no other figure of the fleet."""
    outcome = run("most-idle", profile=FEW_CONNECTIONS)
    num_lost = sum(each.lost for each in outcome.all.requests)
    assert 0 < num_lost == len(WORKLOAD) - sum(each.num_served for each in outcome.replicas)


def test_routers_are_told_of_limits_and_of_slots() -> None:
    _, view = simulate(WORKLOAD)
    assert view.load.max_adapters.tolist() == [3, 3, 3]
    assert view.load.kv_capacity.tolist() == [2400] * 3
    for replica in range(3):
        assert len(view.tiers.adapters_on_device(replica)) == 3, "no more than there are slots"
    assert all(len(view.tiers.on_host(adapter)) == 3 for adapter in range(9))
    request = RoutedRequest(0, 8, 9)
    here = view.tiers.on_device(0)
    waits_s = view.load_s(request, view.candidates(request))
    load = TRUTH.costs.load
    assert waits_s.tolist() == [
        0.0 if replica in here else load.predict(rank=8, from_disk=False) for replica in range(3)
    ]


def test_adapters_come_over_links() -> None:
    """Each adapter comes once to each replica that is not its home, and its request waits for that."""
    requests = [
        WorkloadRequest(arrival_s=1.0 + index, prompt_tokens=9, output_tokens=5, adapter=5)
        for index in range(6)
    ]
    outcome = run("round-robin", workload=requests, link=LINK)
    assert [each.num_fetches for each in outcome.replicas] == [1, 1, 0]
    assert outcome.bytes_moved == 2 * ADAPTER_BYTES
    first_s, _, home_s, again_s, *_ = (
        (each.first_token_s or 0.0) - each.request.arrival_s for each in outcome.all.requests
    )
    assert first_s - home_s == pytest.approx(LINK.seconds(ADAPTER_BYTES))
    assert home_s - again_s == pytest.approx(TRUTH.costs.load.predict(rank=64, from_disk=False))


def test_operating_points_are_of_the_slots_that_there_are() -> None:
    """Slots are sized for the largest rank, so that small adapters are hardly faster; but without the large
    ones they would be."""
    points = operating_points(TRUTH, WORKLOAD, replace(OPTIONS, ranks=(8, 64)), ttft_s=2.0)
    small = operating_points(TRUTH, WORKLOAD, replace(OPTIONS, ranks=(8,)), ttft_s=2.0)
    assert points[8] == pytest.approx(points[64], rel=0.25)
    assert small[8] > points[8]


def test_the_base_model_alone_needs_no_slots() -> None:
    request = WorkloadRequest(arrival_s=7.0, prompt_tokens=9, output_tokens=5, adapter=3)
    decode, prefill, scheduler = TRUTH.costs.decode, TRUTH.costs.prefill, TRUTH.costs.scheduler
    steps_s = prefill.base_s + 9 * prefill.token_s + 4 * (decode.base_s + decode.request_s)
    steps_s += decode.kv_token_s * sum(9 + index for index in range(1, 5)) + 5 * scheduler.request_s
    expected_s = (steps_s + TRUTH.client.latency_s) / 5
    assert base_times(TRUTH, [request], OPTIONS).tpt_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("profile", "options", "error", "says"),
    [
        (TRUTH, replace(OPTIONS, kv_tokens=64), CapacityError, "KV memory holds"),
        (TRUTH, replace(OPTIONS, num_slots=5000, kv_tokens=None), CapacityError, "give fewer --slots"),
        (TRUTH, replace(OPTIONS, max_running=3), UserError, "leave --max-running out"),
    ],
)
def test_what_no_fleet_can_do_is_refused(
    profile: Profile, options: ReplayOptions, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        FleetRuns(profile, WORKLOAD, FleetOptions(num_replicas=2, replay=options))


def test_placements_and_links_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="memory that adapters share with the KV cache"):
        run("most-idle+burst-tolerance")
    options = FleetOptions(num_replicas=2, replay=OPTIONS, link=LINK)
    with pytest.raises(UserError, match="give --adapter-mib, or leave --link out"):
        FleetRuns(TRUTH, WORKLOAD, options)


@pytest.mark.parametrize(
    ("policy", "demand"), [("auto", mean_demand), ("auto+loraserve", extrapolated_demand)]
)
def test_a_placement_is_given_the_demand_that_it_goes_by(
    policy: str, demand: Demand, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Demand] = []

    class Seen(Replanner):
        def __init__(self, *args: Any, demand: Demand, **options: Any) -> None:
            given.append(demand)
            super().__init__(*args, demand=demand, **options)

    monkeypatch.setattr(fleet_run, "Replanner", Seen)
    options = FleetOptions(num_replicas=2, replay=OPTIONS, points=dict.fromkeys((8, 16, 64), 900.0))
    FleetRuns(TRUTH, WORKLOAD[:3], options).run(Policy.of_name(policy))
    assert given == [demand]
