"""Measures the fleet's decisions: one routing decision, a placement of all adapters, a migration."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.load import FleetLoad, ReplicaLimits
from loraplex.fleet.migration.fleet_view import FleetMigrationView
from loraplex.fleet.migration.migrate import moves_for, problem_of
from loraplex.fleet.migration.trigger import UnevenReplicas
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.placements.token_rates import token_rates
from loraplex.fleet.plan import Plan
from loraplex.fleet.policy import PLACEMENTS, PlacementContext
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.named import ROUTERS, router_named
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.perf.set_costs import StepSetCosts

PROFILE: Final = "h200-llama-2-7b-padded"
RANKS: Final = (8, 16, 32, 64)
RANK_BYTES: Final = 1 << 20
NUM_ADAPTERS: Final = 40_000
ROUNDS: Final = 25
RUNNING: Final = 8
"""Requests on each replica while decisions are timed."""
LIMITS: Final = ReplicaLimits(max_running=256, kv_tokens=200_000)
MIGRATED: Final = (8, 500)
"""Numbers of replicas and requests of a migration."""


class _Moves:
    def from_host_s(self, adapter: int) -> float:
        return 2e-3

    def from_elsewhere_s(self, adapter: int) -> float:
        return 20e-3


def measure_decisions(*, tiny: bool = False) -> dict[str, Any]:
    """Return microseconds of a decision by router and fleet size, seconds of placements, and milliseconds of
    a migration: medians, and the worst. For a decision it is the best of several medians, because other
    programs disturb the machine for longer than a thousand decisions take."""
    sizes = (4, 8) if tiny else (60, 1000)
    num_adapters = 200 if tiny else NUM_ADAPTERS
    return {
        "routing_us": {
            str(num_replicas): _routing_us(num_replicas, num_adapters, 20 if tiny else 400)
            for num_replicas in sizes
        },
        "placement_s": _placements_s(num_adapters, sizes[0], 1 if tiny else 5),
        "migration_ms": _migration_ms(*((2, 20) if tiny else MIGRATED), repeats=3 if tiny else 25),
    }


def _routing_us(num_replicas: int, num_adapters: int, count: int) -> dict[str, dict[str, float]]:
    """Time all routers in turn in each round, so that a slow phase of the machine affects all of them."""
    calls = {name: _routing_calls(name, num_replicas, num_adapters, count) for name in ROUTERS}
    rounds = [{name: _timed(each, 1e6) for name, each in calls.items()} for _ in range(ROUNDS)]
    return {name: min((each[name] for each in rounds), key=lambda found: found["median"]) for name in calls}


def _routing_calls(name: str, num_replicas: int, num_adapters: int, count: int) -> list[Callable[[], object]]:
    rng = np.random.default_rng(0)
    view = _view(num_replicas, num_adapters, rng)
    if "table" in name:
        homes = rng.integers(0, num_replicas, (num_adapters, 2))
        view.plan = Plan.with_equal_shares([sorted(set(each)) for each in homes.tolist()])
    router = router_named(name)
    requests = [_request(number, rng, num_adapters) for number in range(count)]
    router.choose(requests[0], view)
    return [partial(router.choose, request, view) for request in requests]


def _placements_s(num_adapters: int, num_replicas: int, repeats: int) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(1)
    ranks = rng.choice(RANKS, num_adapters)
    adapters = AdapterSizes.of(ranks=ranks.tolist(), num_bytes=(ranks * RANK_BYTES).tolist())
    rates = token_rates(_costs(), RANKS)
    context = PlacementContext(operating_points=rates, token_rates=rates, padded=True)
    found = {}
    for name, named in PLACEMENTS.items():
        if named is None:
            continue
        placement = named.make(context)
        previous: Plan | None = None
        problems = []
        for _ in range(repeats):
            problem = PlacementProblem(
                adapters=adapters,
                num_replicas=num_replicas,
                demand=rng.pareto(1.1, num_adapters),
                host_bytes=256 << 30,
                device_bytes=100 << 30,
                previous=previous,
            )
            problems.append(problem)
            previous = placement.place(problem)
        found[name] = _timed([partial(placement.place, problem) for problem in problems], 1.0)
    return found


def _migration_ms(num_replicas: int, num_requests: int, repeats: int) -> dict[str, float]:
    """Time migrations. All requests are on the first half of the replicas, and may move to the second."""
    rng = np.random.default_rng(2)
    calls: list[Callable[[], object]] = []
    for _ in range(repeats):
        view = _view(num_replicas, 200, rng, running=0)
        for number in range(num_requests):
            replica = int(rng.integers(0, num_replicas // 2))
            view.load.sent(number, _request(number, rng, 200), replica)
            view.load.first_token(number)
        half = num_replicas // 2
        uneven = UnevenReplicas(overloaded=tuple(range(half)), underloaded=tuple(range(half, num_replicas)))
        seen = FleetMigrationView(view, lambda request_id: 10)
        calls.append(partial(_migrate, uneven, seen))
    calls[0]()  # the first call imports the solver
    return _timed(calls, 1e3)


def _migrate(uneven: UnevenReplicas, view: FleetMigrationView) -> None:
    assert moves_for(problem_of(uneven, view)), "nothing moves off a replica that has everything"


def _timed(calls: Sequence[Callable[[], object]], unit: float) -> dict[str, float]:
    times = []
    for call in calls:
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * unit)
    return {"median": round(statistics.median(times), 3), "worst": round(max(times), 3)}


def _costs() -> StepSetCosts:
    profile = find_profile(Path(PROFILE))
    assert isinstance(profile, CostModel)
    return StepSetCosts(profile, rank_bytes=RANK_BYTES)


def _view(
    num_replicas: int, num_adapters: int, rng: np.random.Generator, running: int = RUNNING
) -> FleetView:
    """Return a fleet under load."""
    view = FleetView(
        load=FleetLoad([LIMITS] * num_replicas),
        tiers=AdapterTiers(),
        costs=_costs(),
        moves=_Moves(),
        slo_s=10e-3,
    )
    for number in range(num_replicas * running):
        request, replica = _request(number, rng, num_adapters), number % num_replicas
        assert request.adapter is not None
        view.load.sent(number, request, replica)
        view.tiers.staged(replica, request.adapter)
        view.tiers.loaded(replica, request.adapter)
        if number % 4:
            view.load.first_token(number)
    return view


def _request(number: int, rng: np.random.Generator, num_adapters: int) -> RoutedRequest:
    adapter = int(rng.integers(0, num_adapters))
    return RoutedRequest(adapter, RANKS[adapter % len(RANKS)], int(rng.integers(20, 400)))
