"""The controller and the replanner, with planners whose plans are written out."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
import pytest
from fleet_views import ELSEWHERE_S, HOST_S, MEAN_TOKENS, RANKS, Fleet, fleet_of, request_of

from loraplex.core.errors import CapacityError, UserError
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.controller import Controller
from loraplex.fleet.migration.fleet_view import FleetMigrationView
from loraplex.fleet.migration.migrate import MigrationView, Migrator
from loraplex.fleet.migration.problem import Move
from loraplex.fleet.placements.burst_tolerance import BurstTolerancePlacement
from loraplex.fleet.placements.hysteresis import HysteresisPlacement
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.placements.random_placement import RandomPlacement
from loraplex.fleet.plan import Plan
from loraplex.fleet.replanner import Replanner
from loraplex.fleet.routers.round_robin import RoundRobinRouter

ADAPTERS = AdapterSizes.of(ranks=RANKS, num_bytes=[100] * len(RANKS))
ON_0, ON_1 = (Plan.of_homes(np.full(len(RANKS), home)) for home in (0, 1))


def nobody(request_id: Hashable) -> int | None:
    """Fail: without migration no request's output is looked up."""
    raise AssertionError(request_id)


class WrittenPlanner:
    """A planner that returns these plans one after the other."""

    period_s = 10.0

    def __init__(self, *plans: Plan | None) -> None:
        self.plans = list(plans)
        self.previous: list[Plan | None] = []
        self.times: list[tuple[float, float]] = []
        self.counted: list[tuple[int, int]] = []

    def count(self, adapter: int, num_tokens: int) -> None:
        self.counted.append((adapter, num_tokens))

    def place(self, previous: Plan | None, *, since_s: float, now_s: float) -> Plan | None:
        self.previous.append(previous)
        self.times.append((since_s, now_s))
        return self.plans.pop(0)


class WrittenPlacement:
    """A placement that records its problems, and places everything on replica 0; other numbers of adapters by
    `plan`."""

    def __init__(self) -> None:
        self.problems: list[PlacementProblem] = []
        self.plan = ON_0

    def place(self, problem: PlacementProblem) -> Plan:
        self.problems.append(problem)
        return self.plan


def controller_of(
    planner: WrittenPlanner | Replanner | None = None, *, now_s: float | None = 0.0
) -> Controller:
    return Controller(
        adapters=ADAPTERS, view=fleet_of(2).view, router=RoundRobinRouter(), planner=planner, now_s=now_s
    )


# ---- the controller


def test_a_request_is_load_from_its_sending_to_its_end() -> None:
    controller = controller_of()
    load = controller.view.load
    assert [controller.route(number, number, 30) for number in range(2)] == [0, 1]
    assert controller.route("base", None, 7) == 0
    assert load.replica(0).num_waiting == 2
    assert load.replica(0).sum_ranks == RANKS[0]
    assert load.replica(1).max_rank == RANKS[1]
    controller.first_token(0)
    assert (load.replica(0).num_running, load.replica(0).num_waiting) == (1, 1)
    mean_tokens = load.answers.mean_tokens
    assert mean_tokens == MEAN_TOKENS
    controller.ended(0, None)
    assert load.answers.mean_tokens == mean_tokens
    controller.ended(1, 40)
    assert load.answers.mean_tokens < MEAN_TOKENS
    controller.ended("base", 1)
    assert not load.everything.num_requests.any()


def test_tokens_are_counted_for_adapters_and_not_for_failed_answers() -> None:
    planner = WrittenPlanner(None)
    controller = controller_of(planner)
    for request_id, adapter, prompt_tokens in (("a", 3, 30), ("b", 4, 40), ("base", None, 50)):
        controller.route(request_id, adapter, prompt_tokens)
    controller.ended("a", 300)
    controller.ended("b", None)
    controller.ended("base", 500)
    assert planner.counted == [(3, 30), (4, 40), (3, 300)]


def test_a_plan_is_asked_for_each_period() -> None:
    planner = WrittenPlanner(ON_0, ON_1)
    controller = controller_of(planner)
    assert (controller.view.plan, controller.next_tick_s) == (ON_0, 10.0)
    assert controller.route("a", 5, 1) == 0
    controller.tick(9.9, nobody)
    assert controller.view.plan == ON_0
    controller.tick(10.0, nobody)
    assert (controller.view.plan, controller.next_tick_s) == (ON_1, 20.0)
    assert controller.route("b", 5, 1) == 1
    assert planner.previous == [None, ON_0]


def test_a_late_tick_places_once_for_all_the_time_that_passed() -> None:
    planner = WrittenPlanner(ON_0, ON_1)
    controller = controller_of(planner)
    controller.tick(35.0, nobody)
    assert (controller.view.plan, controller.next_tick_s) == (ON_1, 45.0)
    assert planner.times == [(0.0, 0.0), (0.0, 35.0)]


def test_a_late_tick_invents_no_demand() -> None:
    """300 tokens in 30 s are 10 tokens/s, not a burst that has ended."""
    placement = WrittenPlacement()
    replanner = Replanner(placement, adapters=ADAPTERS, num_replicas=2, period_s=10.0)
    controller = controller_of(replanner)
    controller.route("a", 3, 200)
    controller.ended("a", 100)
    controller.tick(30.0, nobody)
    assert [problem.demand[3] for problem in placement.problems] == [1.0, 10.0]


def test_a_real_clock_does_not_make_up_for_the_time_before_the_fleet() -> None:
    planner = WrittenPlanner(ON_0, ON_1)
    controller = controller_of(planner, now_s=1.7e9)
    assert controller.next_tick_s == 1.7e9 + 10
    controller.tick(1.7e9 + 10, nobody)
    assert planner.times == [(1.7e9, 1.7e9), (1.7e9, 1.7e9 + 10)]


def test_a_fleet_may_begin_after_it_was_made() -> None:
    planner = WrittenPlanner(ON_1)
    controller = controller_of(planner, now_s=None)
    with pytest.raises(AssertionError, match="not begun"):
        controller.route("a", 5, 1)
    controller.begin(7.0)
    assert (controller.view.plan, controller.next_tick_s) == (ON_1, 17.0)
    assert planner.times == [(7.0, 7.0)]


def test_an_idle_fleet_begins_its_periods_anew() -> None:
    """The last plan before that includes the demand so far."""
    planner = WrittenPlanner(ON_0, ON_1, ON_0)
    controller = controller_of(planner)
    assert controller.is_idle
    controller.idle_until(1e9)
    assert controller.next_tick_s == 1e9 + 10
    controller.route("a", 5, 1)
    assert not controller.is_idle
    controller.ended("a", 1)
    assert not controller.is_idle, "its tokens are in no plan yet"
    controller.tick(1e9 + 10, nobody)
    assert controller.is_idle
    controller.idle_until(2e9)
    assert (controller.view.plan, controller.next_tick_s) == (ON_1, 2e9 + 10)
    controller.route("base", None, 1)
    assert not controller.is_idle
    assert planner.times == [(0.0, 0.0), (1e9, 1e9 + 10)]


@pytest.mark.parametrize("adapter", [-1, len(RANKS)])
def test_an_adapter_that_the_fleet_does_not_have_is_refused(adapter: int) -> None:
    controller = controller_of(WrittenPlanner(None))
    with pytest.raises(UserError, match=f"there is no adapter {adapter}: the fleet has 8 adapters"):
        controller.route("a", adapter, 1)
    assert controller.view.load.is_empty


def test_a_replica_that_is_down_or_drains_is_sent_nothing() -> None:
    controller = controller_of()
    controller.drain(0)
    assert [controller.route(number, 0, 1) for number in range(3)] == [1, 1, 1]
    controller.up(0)
    controller.down(1)
    assert [controller.route(number, 0, 1) for number in range(3, 6)] == [0, 0, 0]
    controller.drain(0)
    with pytest.raises(CapacityError, match="no replica"):
        controller.route(6, 0, 1)
    for report in (controller.up, controller.down, controller.drain):
        with pytest.raises(UserError, match="there is no replica 2: the fleet has 2 replicas"):
            report(2)


def test_an_adapter_is_fetched_from_a_replica_that_is_up() -> None:
    """Even if one that is down could send sooner; unless it is the only holder left."""
    plan = Plan.with_equal_shares([(0, 1), *[(2,)] * (len(RANKS) - 1)])
    controller = Controller(
        adapters=ADAPTERS,
        view=fleet_of(4).view,
        router=RoundRobinRouter(),
        planner=WrittenPlanner(plan),
        shares_adapters=True,
        now_s=0.0,
    )
    free_at_s = [0.0, 5.0, 9.0, 0.0].__getitem__
    controller.down(0)
    controller.drain(1)
    assert controller.fetch(2, 0, free_at_s).source == 1
    controller.down(2)
    assert controller.fetch(3, 1, free_at_s).source == 2
    controller.up(0)
    assert controller.fetch(3, 0, free_at_s).source == 0


def test_gamma_counts_the_loads_that_moves_cause() -> None:
    """Each load counts once for all requests for an adapter that move to a replica, and not if it is on the
    device."""
    views: list[MigrationView] = []

    class Watcher(Migrator):
        def decide(self, now_s: float, view: MigrationView) -> list[Move]:
            views.append(view)
            return []

    def gamma_after(*adapters_on_1: int) -> float:
        fleet = fleet_of(2)
        for adapter in adapters_on_1:
            fleet.view.tiers.loaded(1, adapter)
        controller = Controller(
            adapters=ADAPTERS, view=fleet.view, router=RoundRobinRouter(), migrator=Watcher(), now_s=0.0
        )
        controller.down(1)
        for request_id in range(3):
            controller.route(request_id, 0, 100)
        controller.tick(10.0, lambda request_id: 0)
        controller.ended(0, 50)
        for request_id in (1, 2):
            controller.moved(request_id, 1, 0)
        controller.tick(20.0, lambda request_id: 0)
        return views[-1].costs.gamma

    one_load = gamma_after() - gamma_after(0)
    output_token_s = FleetMigrationView(fleet_with_three().view, lambda request_id: 0).output_token_s
    assert one_load == pytest.approx((HOST_S + ELSEWHERE_S) / (50 * output_token_s))


def fleet_with_three() -> Fleet:
    fleet = fleet_of(2)
    for _ in range(3):
        fleet.send(request_of(0, 100), 0)
    return fleet


def test_without_a_planner_there_is_nothing_to_tick_for() -> None:
    assert controller_of().next_tick_s == math.inf
    assert controller_of().view.plan is None


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            Plan.of_homes(np.full(len(RANKS), 2)),
            "places adapter 0 on replica 2, but the fleet has 2 replicas",
        ),
        (Plan.of_homes(np.zeros(9, np.int64)), "names adapter 8, but the fleet has 8 adapters"),
        (Plan.of_homes(np.zeros(3, np.int64)), "adapter 3 has no replica"),
    ],
)
def test_a_plan_that_names_what_is_not_there_is_refused(plan: Plan, words: str) -> None:
    with pytest.raises(UserError, match=words):
        controller_of(WrittenPlanner(plan))
    controller = controller_of(WrittenPlanner(ON_0, plan))
    with pytest.raises(UserError, match=words):
        controller.tick(10.0, nobody)
    assert controller.view.plan == ON_0


# ---- the replanner


def test_demand_is_the_trend_of_counted_tokens_per_second() -> None:
    placement = WrittenPlacement()
    replanner = Replanner(
        placement,
        adapters=ADAPTERS,
        num_replicas=2,
        period_s=10.0,
        host_bytes=1000,
        device_bytes=5000,
        seed=7,
    )
    plan = replanner.place(None, since_s=0.0, now_s=0.0)
    assert plan == ON_0
    assert placement.problems[0].demand.tolist() == [1.0] * len(RANKS)
    for number, tokens in enumerate((100, 200, 300)):
        replanner.count(2, tokens - 50)
        replanner.count(2, 50)
        replanner.count(5, 70)
        replanner.place(plan, since_s=10.0 * number, now_s=10.0 * (number + 1))
    first, second, third = (problem.demand for problem in placement.problems[1:])
    assert first[[2, 5]] == pytest.approx([10, 7])
    assert second[[2, 5]] == pytest.approx([30, 7])
    assert third[[2, 5]] == pytest.approx([40, 7])
    problem = placement.problems[-1]
    assert problem.demand.sum() == pytest.approx(47)
    assert (problem.num_replicas, problem.host_bytes, problem.device_bytes, problem.seed) == (
        2,
        1000,
        5000,
        7,
    )
    assert problem.previous is plan


def test_only_the_last_periods_count() -> None:
    placement = WrittenPlacement()
    replanner = Replanner(placement, adapters=ADAPTERS, num_replicas=1, period_s=1.0)
    plan = replanner.place(None, since_s=0.0, now_s=0.0)
    for tokens in [10_000, *[10] * 5]:
        replanner.count(0, tokens)
        replanner.place(plan, since_s=0.0, now_s=1.0)
    assert placement.problems[-1].demand[0] == pytest.approx(10)


def test_known_demand_takes_the_place_of_the_trend() -> None:
    placement = WrittenPlacement()
    replanner = Replanner(
        placement,
        adapters=ADAPTERS,
        num_replicas=1,
        period_s=1.0,
        known_demand=lambda now_s: np.full(len(RANKS), now_s),
    )
    plan = replanner.place(None, since_s=3.0, now_s=3.0)
    replanner.count(0, 100)
    replanner.place(plan, since_s=3.0, now_s=4.0)
    assert [problem.demand[0] for problem in placement.problems] == [3.0, 4.0]


def test_a_placement_that_is_made_once_asks_for_no_tick() -> None:
    replanner = Replanner(WrittenPlacement(), adapters=ADAPTERS, num_replicas=2, period_s=math.inf)
    assert controller_of(replanner).next_tick_s == math.inf
    with pytest.raises(AssertionError, match="made once"):
        replanner.place(ON_0, since_s=0.0, now_s=1.0)


def test_steady_demand_keeps_the_plan() -> None:
    """The plan is the same object, so that nobody has to compare two plans to see that nothing moves."""
    placement = HysteresisPlacement(placement=BurstTolerancePlacement())
    replanner = Replanner(placement, adapters=ADAPTERS, num_replicas=2, period_s=10.0, device_bytes=500)
    controller = controller_of(replanner)

    def period(number: int) -> Plan | None:
        for adapter, num_tokens in enumerate((900, 500, 300, 200, 100, 50, 20, 10)):
            controller.route((number, adapter), adapter, num_tokens)
            controller.ended((number, adapter), num_tokens)
        controller.tick(10.0 * number, nobody)
        return controller.view.plan

    settled = period(1)
    assert settled is not None
    assert all(period(number) is settled for number in range(2, 9))


# ---- replicas and adapters that come and go


def replanner_of(num_replicas: int, num_adapters: int) -> Replanner:
    table = AdapterSizes.of(ranks=[8] * num_adapters, num_bytes=[100] * num_adapters)
    return Replanner(RandomPlacement(), adapters=table, num_replicas=num_replicas, period_s=10.0)


def test_a_plan_is_mended_where_replicas_are_gone_and_nowhere_else() -> None:
    replanner = replanner_of(3, 4)
    plan = Plan.of_weights([{0: 1.0}, {1: 1.0}, {0: 0.5, 1: 0.25, 2: 0.25}, {2: 1.0}])
    assert replanner.mended(plan) is plan
    replanner.serve([1, 2], 3)
    mended = replanner.mended(plan)
    assert mended.replicas[0] in ((1,), (2,))
    assert mended.replicas[1:] == ((1,), (1, 2), (2,))
    assert mended.shares[2] == (0.5, 0.5)
    assert replanner.mended(mended) is mended


def test_adapters_that_are_gone_are_placed_nowhere_and_those_that_come_get_a_place() -> None:
    placement = WrittenPlacement()
    replanner = Replanner(placement, adapters=ADAPTERS, num_replicas=2, period_s=10.0)
    replanner.serve([1], 2)
    for adapter in range(1, len(ADAPTERS)):
        replanner.remove_adapter(adapter)
    replanner.add_adapters(AdapterSizes.of(ranks=[4], num_bytes=[50]))
    plan = replanner_of(2, 1).place(None, since_s=0.0, now_s=0.0)
    placement.plan = Plan.of_homes(np.zeros(2, np.int64))
    placed = replanner.mended(plan)
    (problem,) = placement.problems
    assert (problem.adapters.ranks.tolist(), problem.num_replicas) == ([RANKS[0], 4], 1)
    assert placed.replicas == ((1,),) * 9
    replanner.restore_adapter(3)
    placement.plan = Plan.of_homes(np.zeros(3, np.int64))
    replanner.mended(placed)
    assert placement.problems[-1].adapters.ranks.tolist() == [RANKS[0], RANKS[3], 4]


def test_tokens_stay_counted_when_adapters_are_added() -> None:
    placement = WrittenPlacement()
    replanner = Replanner(placement, adapters=ADAPTERS, num_replicas=2, period_s=10.0)
    replanner.count(2, 100)
    replanner.place(ON_0, since_s=0.0, now_s=10.0)
    replanner.count(2, 300)
    replanner.add_adapters(AdapterSizes.of(ranks=[4], num_bytes=[50]))
    replanner.count(8, 70)
    placement.plan = Plan.of_homes(np.zeros(9, np.int64))
    replanner.place(Plan.of_homes(np.zeros(9, np.int64)), since_s=10.0, now_s=20.0)
    assert placement.problems[-1].demand[[2, 8]] == pytest.approx([50, 14])
