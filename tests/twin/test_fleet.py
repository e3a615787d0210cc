"""Simulated replicas behind the fleet's controller: nothing is lost, each does what it would do alone, and
looking changes nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from fleets import LINK, OPTIONS, WORKLOAD, check_all_served, run, times_of
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import imagined_machine, random_workload

from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.controller import Controller, Planner
from loraplex.fleet.load import FleetLoad, ReplicaLimits
from loraplex.fleet.migration.migrate import MigrationView, Migrator
from loraplex.fleet.migration.problem import Move
from loraplex.fleet.plan import Plan
from loraplex.fleet.policy import Policy
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.round_robin import RoundRobinRouter
from loraplex.fleet.routers.router import Router
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.cost_model import CostModel
from loraplex.perf.set_costs import StepSetCosts
from loraplex.twin.fleet import FleetOutcome, SimulatedFleet
from loraplex.twin.fleet_run import FleetOptions, FleetRuns
from loraplex.twin.links import Links, LinkSpeed
from loraplex.twin.replay import OwnEngines, ReplayOptions, longest_of, replay
from loraplex.twin.simulator import Simulator
from loraplex.twin.slo import Slo
from loraplex.workload.jsonl import WorkloadRequest

POLICIES = (
    "random", "round-robin", "first-fit", "most-idle", "pending-time", "rank-aware", "affinity", "rendezvous",
    "routing-table+contiguous", "routing-table-random+random", "most-idle+burst-tolerance",
    "auto", "oracle",
)  # fmt: skip


@pytest.mark.parametrize("link", [None, LINK])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_by_one_replica(policy: str, link: LinkSpeed | None) -> None:
    check_all_served(run(policy, link=link), WORKLOAD)


@pytest.mark.parametrize("until_s", [math.inf, 4.0])
@pytest.mark.parametrize("policy", ["most-idle", "routing-table+contiguous"])
def test_a_fleet_of_one_does_what_the_engine_does(policy: str, until_s: float) -> None:
    options = replace(OPTIONS, until_s=until_s)
    alone = replay(imagined_machine(), WORKLOAD, options)
    outcome = run(policy, num_replicas=1, options=options)
    assert list(outcome.all.requests) == list(alone.requests)
    assert outcome.all.summary() == alone.summary()


@pytest.mark.parametrize("policy", ["most-idle", "rank-aware", "rendezvous"])
def test_a_replica_does_what_it_would_with_its_share_alone(policy: str) -> None:
    outcome = run(policy, num_replicas=4)
    for number in range(4):
        mine = [index for index, chosen in enumerate(outcome.chosen) if chosen == number]
        alone = replay(imagined_machine(), [WORKLOAD[index] for index in mine], OPTIONS)
        # The same steps; leaps that are cut at other places add up to the same but for the last digit.
        found = [outcome.all.requests[index] for index in mine]
        assert times_of(found) == pytest.approx(times_of(alone.requests), rel=1e-12)


class Lookout:
    """Looks at everything, and then does what another router does."""

    def __init__(self) -> None:
        self._router = RoundRobinRouter()
        self.seen: list[int] = []

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        candidates = view.candidates(request)
        view.costs.decode_s(view.load.everything)
        view.load_s(request, candidates)
        view.load.check_integrity()
        self.seen.append(sum(view.load.replica(number).num_running for number in range(3)))
        return self._router.choose(request, view)


def simulate(
    router: Router,
    workload: list[WorkloadRequest],
    migrator: Migrator | None = None,
    machine: CostModel | None = None,
    fleet: Callable[..., SimulatedFleet] = SimulatedFleet,
    options: ReplayOptions = OPTIONS,
    link: LinkSpeed | None = None,
    planner: Planner | None = None,
) -> tuple[FleetOutcome, FleetView]:
    machine = machine or imagined_machine()
    engines = OwnEngines(machine, options, longest=longest_of(workload))

    class Moves:
        def from_host_s(self, adapter: int) -> float:
            return 0.01

        def from_elsewhere_s(self, adapter: int) -> float:
            return 0.1

    limits = ReplicaLimits(max_running=engines.max_running, kv_tokens=engines.kv_tokens)
    view = FleetView(
        load=FleetLoad([limits] * 3),
        tiers=AdapterTiers(),
        costs=StepSetCosts(machine, rank_bytes=engines.rank_bytes),
        moves=Moves(),
    )
    adapters = AdapterSizes.of(ranks=engines.ranks, num_bytes=engines.sizes)
    controller = Controller(
        adapters=adapters,
        view=view,
        router=router,
        planner=planner,
        migrator=migrator,
        shares_adapters=link is not None,
    )
    links = None if link is None else Links(link, 3)
    return fleet(engines, controller, links=links).run(workload), view


@pytest.mark.parametrize("until_s", [math.inf, 500.0])
def test_a_run_ends_with_its_last_request(until_s: float) -> None:
    """Not with the next plan, though the last request waits for an adapter and has one token only."""
    workload = [WorkloadRequest(arrival_s=0.0, prompt_tokens=8, output_tokens=1, adapter=3)]
    outcome = run("auto", workload=workload, options=replace(OPTIONS, until_s=until_s), period_s=60.0)
    assert outcome.all.duration_s == outcome.all.requests[0].finish_s


def test_looking_at_replicas_changes_nothing() -> None:
    lookout = Lookout()
    watched, view = simulate(lookout, WORKLOAD)
    unwatched, _ = simulate(RoundRobinRouter(), WORKLOAD)
    assert list(watched.all.requests) == list(unwatched.all.requests)
    assert watched.all.summary() == unwatched.all.summary()
    assert max(lookout.seen) > 3, "requests were seen running"
    for column in (*view.load.everything, *view.load.waiting):
        assert not np.any(column), "all have ended"


def test_a_burst_is_seen_before_any_step_is_decided() -> None:
    burst = [WorkloadRequest(arrival_s=1.0, prompt_tokens=9, output_tokens=5, adapter=0) for _ in range(9)]
    outcome = run("most-idle", workload=burst)
    assert [each.num_requests for each in outcome.replicas] == [3, 3, 3]


def test_routers_see_adapters_where_they_are() -> None:
    """The second of two requests that come far apart is cheaper where the first one was."""
    requests = [
        WorkloadRequest(arrival_s=float(second), prompt_tokens=9, output_tokens=5, adapter=4)
        for second in range(8)
    ]
    outcome = run("pending-time", workload=requests)
    assert len(set(outcome.chosen)) == 1
    assert sum(each.num_loads for each in outcome.replicas) == 1


def test_a_placement_keeps_adapters_to_their_replicas() -> None:
    outcome = run("most-idle+contiguous")
    homes: dict[int, set[int]] = {}
    for request, chosen in zip(WORKLOAD, outcome.chosen, strict=True):
        homes.setdefault(request.adapter, set()).add(chosen)
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert [each.num_adapters for each in outcome.replicas] == [3, 3, 3]


def test_an_adapter_is_fetched_once_however_many_wait() -> None:
    burst = [
        WorkloadRequest(arrival_s=1.0 + index / 1e4, prompt_tokens=9, output_tokens=5, adapter=5)
        for index in range(6)
    ]
    outcome = run("round-robin", workload=burst, link=LINK)
    assert outcome.most_bytes_held is not None
    # Its home is replica 2; the two others fetch it once each.
    assert [each.num_fetches for each in outcome.replicas] == [1, 1, 0]
    assert outcome.bytes_moved == 2 * (64 << 20)
    first = [each.first_token_s for each in outcome.all.requests]
    assert all(moment is not None and moment - 1.0 >= (64 << 20) / 2e9 for moment in (first[0], first[1]))


def test_adapters_that_are_placed_are_there_from_the_beginning() -> None:
    outcome = run("routing-table+contiguous", link=LINK)
    assert outcome.bytes_moved == 0
    assert sum(each.num_loads for each in outcome.replicas) == 9


@pytest.mark.parametrize("tells_lengths", [True, False])
def test_lengths_of_answers_are_told_to_an_oracle_alone(tells_lengths: bool) -> None:
    class Listener(RoundRobinRouter):
        def choose(self, request: RoutedRequest, view: FleetView) -> int:
            told.append(request.output_tokens)
            return super().choose(request, view)

    told: list[int | None] = []
    simulate(Listener(), WORKLOAD, fleet=partial(SimulatedFleet, tells_lengths=tells_lengths))
    assert told == [each.output_tokens if tells_lengths else None for each in WORKLOAD]


def test_an_oracle_knows_the_first_period_whenever_it_begins() -> None:
    """The first requests of a workload find their adapters placed, however its arrivals are counted."""
    uneven = [replace(each, adapter=each.adapter if n % 3 else 2) for n, each in enumerate(WORKLOAD)]
    later = [replace(each, arrival_s=each.arrival_s + 4096) for each in uneven]
    first, second = (
        run("oracle", workload=workload, period_s=100.0, link=LINK) for workload in (uneven, later)
    )
    assert first.bytes_moved == second.bytes_moved
    assert list(first.chosen[:50]) == list(second.chosen[:50])


def test_a_slow_link_shows_in_first_tokens() -> None:
    slow, fast = (
        run("round-robin", link=LinkSpeed(bytes_per_s=speed)).all.summary()["ttft_s"]["mean"]
        for speed in (1e8, 1e11)
    )
    assert slow > fast


def test_moved_adapters_are_fetched_and_let_go() -> None:
    """The demand for ranks turns round, so that LoRAServe's placement moves adapters while requests run."""
    workload = [
        replace(each, adapter=each.adapter if each.arrival_s < 5 else 8 - each.adapter)
        for each in random_workload(5, num_requests=400, num_adapters=3, rps=40.0)
    ]
    options = FleetOptions(
        num_replicas=3,
        replay=OPTIONS,
        slo=Slo(tpt_s=0.01),
        period_s=1.0,
        link=LINK,
        points={8: 900, 16: 800, 64: 500},
    )
    outcome = FleetRuns(imagined_machine(), workload, options).run(Policy.of_name("routing-table+loraserve"))
    check_all_served(outcome, workload)
    assert outcome.bytes_moved > 0
    assert outcome.most_bytes_held is not None
    assert outcome.most_bytes_held < sum(rank << 20 for rank in (8, 16, 64) * 3), "no host holds all"


def test_a_copy_that_no_plan_names_is_let_go_after_its_requests() -> None:
    """It is still being read, or copied to the device, when the directory has it complete and lets it go."""
    homes = Plan.of_homes(np.zeros(9, np.int64))

    class AllOnTheFirst:
        period_s = math.inf

        def count(self, adapter: int, num_tokens: int) -> None: ...

        def place(self, previous: Plan | None, *, since_s: float, now_s: float) -> Plan:
            return homes

    class Watched(SimulatedFleet):
        def _outcome(self) -> FleetOutcome:
            simulators = [replica.simulator for replica in self._replicas]
            assert all(isinstance(each, Simulator) for each in simulators)
            staged.extend(
                (replica, adapter)
                for replica, simulator in enumerate(simulators)
                for adapter in range(9)
                if isinstance(simulator, Simulator) and simulator.is_staged(f"adapter-{adapter}")
            )
            return super()._outcome()

    staged: list[tuple[int, int]] = []
    requests = [
        WorkloadRequest(arrival_s=0.005 * number, prompt_tokens=9, output_tokens=5, adapter=5)
        for number in range(60)
    ]
    outcome, view = simulate(
        RoundRobinAnywhere(), requests, fleet=Watched, link=LINK, planner=AllOnTheFirst()
    )
    check_all_served(outcome, requests)
    assert view.plan is homes
    assert [each.num_fetches for each in outcome.replicas] == [0, 1, 1]
    assert staged == [(0, 5)], "the others have it on their devices alone"


class RoundRobinAnywhere:
    """Does not keep to the plan."""

    def __init__(self) -> None:
        self._num_sent = 0

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        self._num_sent += 1
        return self._num_sent % view.load.num_replicas


@pytest.mark.parametrize("max_running", [1, 8])
def test_a_full_host_lets_copies_go_that_it_fetched(max_running: int) -> None:
    """Without a plan every replica fetches every adapter; together they are more than a host holds."""
    rng = random.Random(0)
    requests = [
        WorkloadRequest(arrival_s=float(second), prompt_tokens=9, output_tokens=5, adapter=rng.randrange(9))
        for second in range(200)
    ]
    options = replace(OPTIONS, host_memory=120 << 20, max_running=max_running)
    outcome, unlimited = (
        run("round-robin", workload=requests, options=each, link=LINK) for each in (options, OPTIONS)
    )
    check_all_served(outcome, requests)
    assert unlimited.most_bytes_held == sum(rank << 20 for rank in (8, 16, 64) * 3)
    assert outcome.most_bytes_held is not None
    assert outcome.most_bytes_held <= (120 + 64) << 20, "last copies, and one that was in use"
    assert outcome.bytes_moved is not None
    assert unlimited.bytes_moved is not None
    assert outcome.bytes_moved > unlimited.bytes_moved, "what was let go is fetched again"
    busy = run("round-robin", options=options, link=LINK)
    check_all_served(busy, WORKLOAD)


class RestlessMigrator(Migrator):
    """Moves requests at random, all the time. `kv_tokens`: what it saw of each request, by its number."""

    def __init__(self, seed: int, num_replicas: int, period_s: float = 0.05) -> None:
        super().__init__(period_s=period_s)
        self._rng = random.Random(seed)
        self._num_replicas = num_replicas
        self.kv_tokens: dict[Hashable, list[int]] = {}

    def decide(self, now_s: float, view: MigrationView) -> list[Move]:
        super().decide(now_s, view)  # so that it is due again when the period is over
        found = [each for replica in range(self._num_replicas) for each in view.requests_on(replica)]
        for each in found:
            self.kv_tokens.setdefault(each.request_id, []).append(each.kv_tokens)
        return [
            Move(each.request_id, each.replica, (each.replica + 1) % self._num_replicas)
            for each in found
            if self._rng.random() < 0.2
        ]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), rps=st.sampled_from([20.0, 200.0]), on_gpu=st.booleans())
def test_requests_that_move_lose_no_token(seed: int, rps: float, on_gpu: bool) -> None:
    workload = random_workload(seed, num_requests=40, num_adapters=9, rps=rps)
    machine = imagined_machine()
    if not on_gpu:
        machine = replace(machine, subject=replace(machine.subject, device="cpu"))
    migrator = RestlessMigrator(seed, 3)
    outcome, view = simulate(RoundRobinRouter(), workload, migrator, machine)
    assert outcome.num_moves > 0
    check_all_served(outcome, workload)
    for number, seen in migrator.kv_tokens.items():
        assert isinstance(number, int)
        request = workload[number]
        assert seen == sorted(seen), "answers grow, also those that moved"
        assert request.prompt_tokens <= seen[0]
        assert seen[-1] < request.prompt_tokens + request.output_tokens
    for column in (*view.load.everything, *view.load.waiting):
        assert not np.any(column), "all have ended"
    for each in outcome.all.requests:
        assert each.first_token_s is not None
        assert each.finish_s is not None
        assert each.request.arrival_s < each.first_token_s <= each.finish_s


@pytest.mark.parametrize("gaps_s", [(1.7e9, 0.0), (0.0, 1e6), (1e6, 1e6)])
def test_idle_time_is_passed_over(gaps_s: tuple[float, float]) -> None:
    """Before the first request, whose time may be counted from 1970, and between two requests."""
    before_s, between_s = gaps_s
    workload = [
        replace(each, arrival_s=each.arrival_s + before_s + (between_s if number >= 20 else 0.0))
        for number, each in enumerate(random_workload(1, num_requests=40, num_adapters=9, rps=20.0))
    ]
    num_ticks = 0

    class Counted(RestlessMigrator):
        def decide(self, now_s: float, view: MigrationView) -> list[Move]:
            nonlocal num_ticks
            num_ticks += 1
            assert num_ticks < 1000, "idle time is gone through period by period"
            return super().decide(now_s, view)

    outcome, _ = simulate(RoundRobinRouter(), workload, Counted(1, 3))
    assert outcome.num_moves > 0
    check_all_served(outcome, workload)


@pytest.mark.parametrize("policy", ["most-idle+burst-tolerance", "most-idle+burst-tolerance+migrate"])
def test_plans_are_made_from_the_first_arrival_on(policy: str) -> None:
    later = [replace(each, arrival_s=each.arrival_s + 2.0**20) for each in WORKLOAD]
    alike, shifted = (run(policy, workload=each, link=LINK) for each in (WORKLOAD, later))
    check_all_served(shifted, later)
    assert (shifted.bytes_moved, shifted.num_moves) == (alike.bytes_moved, alike.num_moves)


@pytest.mark.parametrize("warm", [True, False])
def test_the_first_plan_of_a_fleet_that_has_served_goes_by_the_first_minute(warm: bool) -> None:
    popular = [replace(each, adapter=0) for each in WORKLOAD]
    outcome = run("routing-table+auto", workload=popular, period_s=1e6, warm=warm)
    num_serving = sum(each.num_requests > 0 for each in outcome.replicas)
    assert num_serving == (3 if warm else 1), "by itself it would give all adapters an equal share"


def test_a_request_moves_with_the_tokens_it_has_when_that_is_decided() -> None:
    """Long answers: between two ticks nothing can be seen of a replica, and leaps go far beyond them."""
    long = [
        WorkloadRequest(arrival_s=0.01 * index, prompt_tokens=9, output_tokens=4000, adapter=0)
        for index in range(40)
    ]
    moved: list[tuple[float, int]] = []

    class Watched(SimulatedFleet):
        def _move(self, move: Move, now_s: float) -> None:
            assert isinstance(move.request_id, int)
            num_output = self._num_output(move.request_id)
            assert num_output is not None
            assert self._replicas[move.source].simulator.now_s >= now_s
            moved.append((now_s, num_output))
            super()._move(move, now_s)

    outcome, _ = simulate(
        FirstReplica(),
        long,
        RestlessMigrator(0, 3, period_s=10.0),
        fleet=Watched,
        options=replace(OPTIONS, kv_tokens=300_000),
    )
    check_all_served(outcome, long)
    assert moved
    assert all(now_s >= 10.0 and num_output > 100 for now_s, num_output in moved)


class FirstReplica:
    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        return 0


def test_who_asks_first_is_sent_first() -> None:
    """Also after the last arrival, when replicas have nothing in common any more but their links."""
    requests = [
        WorkloadRequest(arrival_s=index / 1e3, prompt_tokens=9, output_tokens=40, adapter=index // 3 % 9)
        for index in range(60)
    ]
    asked: list[float] = []

    class Watched(SimulatedFleet):
        def _fetch_end_s(self, chosen: int, version: str) -> float:
            asked.append(self._replicas[chosen].simulator.now_s)
            return super()._fetch_end_s(chosen, version)

    options = replace(OPTIONS, max_running=2)
    simulate(RoundRobinRouter(), requests, fleet=Watched, options=options, link=LinkSpeed(bytes_per_s=2e8))
    assert len(asked) > 9
    assert all(later > earlier - 0.05 for earlier, later in pairwise(asked)), "in order, but for some steps"


def test_routers_are_told_of_copies_that_left_host_memory() -> None:
    options = replace(OPTIONS, host_memory=100 << 20, kv_tokens=500)
    _, view = simulate(FirstReplica(), WORKLOAD, options=options)
    held = [adapter for adapter in range(9) if 0 in view.tiers.on_host(adapter)]
    assert 0 < sum((8, 16, 64)[adapter % 3] for adapter in held) <= 100 + 64, (
        "those read last may not be there yet"
    )


def test_a_hot_replica_hands_requests_over() -> None:
    """All requests are on an adapter of one replica; migration sends some of them to the other."""
    made = random_workload(3, num_requests=900, num_adapters=9, rps=90.0)
    workload = [replace(each, adapter=0) for each in made]
    options = replace(OPTIONS, max_running=8)
    stays, moves = (
        run(policy, num_replicas=2, workload=workload, options=options)
        for policy in ("routing-table+contiguous", "routing-table+contiguous+migrate")
    )
    check_all_served(moves, workload)
    assert stays.num_moves == 0
    assert moves.num_moves > 0
    assert moves.all.duration_s < stays.all.duration_s
