"""Runs a workload on a simulated fleet, under a policy given by name."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from loraplex.core.errors import UserError
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.controller import Controller
from loraplex.fleet.load import FleetLoad
from loraplex.fleet.migration.migrate import Migrator
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.placements.token_rates import token_rates
from loraplex.fleet.policy import PLACEMENTS, PlacementContext, Policy
from loraplex.fleet.replanner import PERIOD_S, Replanner
from loraplex.fleet.routers.named import router_named
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.fleet.waiting_room import WaitingRoom
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.perf.set_costs import CostForm
from loraplex.twin.fleet import FleetOutcome, SimulatedFleet
from loraplex.twin.fleet_engines import fleet_engines
from loraplex.twin.foresight import Foresight
from loraplex.twin.front import Front
from loraplex.twin.links import Links, LinkSpeed
from loraplex.twin.operating_points import operating_points
from loraplex.twin.paused_collector import paused_collector
from loraplex.twin.replay import (
    ReplayOptions,
    check_options,
    check_workload,
    longest_of,
    replay,
)
from loraplex.twin.slo import NO_SLO, Slo
from loraplex.workload.jsonl import WorkloadRequest

_NUM_ALONE: Final = 100
_NUM_REPORTS: Final = 100
_SHUFFLE_S: Final = 10.0
"""Requests that arrive within this many seconds are exchanged to make a similar workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOptions:
    """The simulated fleet, the same under every policy. `slo`: limits on requests' times, of which routers
    see the time per token. `points`: tokens/s that a replica sustains, by rank; None to find them when a
    placement needs them. `link`: the network over which replicas copy adapters from each other's host memory;
    None if each reads them from its disk. `adapter_bytes`: size of each adapter, for engines with slots,
    whose profile does not contain it. `cost_form`: form of the costs that policies use. `warm`: the fleet has
    served before, and its first plan uses the demand of the first minute."""

    num_replicas: int
    replay: ReplayOptions
    slo: Slo = NO_SLO
    period_s: float = PERIOD_S
    points: Mapping[int, float] | None = None
    link: LinkSpeed | None = None
    adapter_bytes: int | None = None
    cost_form: CostForm = CostForm.STEPS
    warm: bool = False


class FleetRuns:
    """One workload on one fleet, to be run under any number of policies."""

    def __init__(self, profile: Profile, workload: Sequence[WorkloadRequest], options: FleetOptions) -> None:
        """Raises UserError if no fleet could run the workload."""
        if options.num_replicas < 1:
            raise UserError(f"a fleet has at least one replica, not {options.num_replicas}")
        check_workload(workload, options.replay)
        check_options(profile, options.replay)
        self._profile = profile
        self._workload = workload
        self._options = options
        self._has = fleet_engines(
            profile,
            options.replay,
            longest=longest_of(workload),
            link=options.link,
            adapter_bytes=options.adapter_bytes,
            cost_form=options.cost_form,
        )
        self._points = options.points
        # If adapters come from disk, a host only caches them, and need not hold all that it serves.
        self._host_bytes = None if options.link is None else self._has.host_bytes
        self._check_hosts()

    def _check_hosts(self) -> None:
        """Raise UserError if adapters are shared over a link and the hosts cannot hold all of them."""
        adapters = self._has.adapters
        try:
            PlacementProblem(
                adapters=adapters,
                num_replicas=self._options.num_replicas,
                demand=np.zeros(len(adapters)),
                host_bytes=self._host_bytes,
            )
        except UserError as error:
            raise UserError(
                f"{error}; smaller adapters (--adapter-mib) take less, and without --link replicas read them "
                "from disk and need not hold all of them"
            ) from error

    @property
    def adapters(self) -> AdapterSizes:
        return self._has.adapters

    def run(
        self, policy: Policy, seed: int = 0, report: Callable[[float], None] | None = None
    ) -> FleetOutcome:
        """Simulate the workload, or with a seed other than 0 a similar one. `report`: called occasionally
        with the share of the requests that have arrived."""
        with paused_collector():
            return self._run(policy, seed, report)

    def _run(self, policy: Policy, seed: int, report: Callable[[float], None] | None) -> FleetOutcome:
        workload = shuffled(self._workload, seed)
        controller = self._controller(policy, seed, workload)
        link, num_replicas = self._options.link, self._options.num_replicas
        links = None if link is None else Links(link, num_replicas)
        fleet = SimulatedFleet(
            self._has.engines,
            controller,
            self._options.replay.until_s,
            links,
            tells_lengths=policy.knows_future,
            front=self._front(),
        )
        outcome = fleet.run(workload if report is None else _reported(workload, report))
        return outcome if self._has.knows_sizes else replace(outcome, bytes_moved=None)

    def _front(self) -> Front | None:
        """Return what decides which requests are refused; None if none is."""
        replay = self._options.replay
        if not replay.limits_waiting or not isinstance(self._profile, CostModel):
            return None
        assert self._profile.memory is not None, "engines were made by it"
        room = WaitingRoom(replay.max_waiting, replay.max_ttft_s, replay.max_borrowing)
        room.set_policies(replay.tenants)
        return Front(room, step_tokens=self._profile.memory.step_tokens)

    def _controller(self, policy: Policy, seed: int, workload: Sequence[WorkloadRequest]) -> Controller:
        options, has = self._options, self._has
        view = FleetView(
            load=FleetLoad([has.limits] * options.num_replicas),
            tiers=AdapterTiers(),
            costs=has.costs,
            moves=has.moves,
            slo_s=options.slo.token_s,
        )
        return Controller(
            adapters=has.adapters,
            view=view,
            router=router_named(policy.routing, seed),
            planner=self._planner(policy, seed, workload),
            shares_adapters=options.link is not None,
            host_bytes=self._host_bytes,
            migrator=Migrator() if policy.migrates else None,
        )

    def _planner(self, policy: Policy, seed: int, workload: Sequence[WorkloadRequest]) -> Replanner | None:
        named = PLACEMENTS[policy.placement]
        if named is None:
            return None
        context = PlacementContext(
            operating_points=self._operating_points() if named.needs_points else {},
            token_rates=token_rates(self._has.costs, self._has.adapters.ranks.tolist()),
            padded=self._has.pads,
        )
        num_slots = self._has.limits.max_adapters
        demand = Foresight(workload, len(self._has.adapters)).demand
        return Replanner(
            named.make(context),
            adapters=self._has.adapters,
            num_replicas=self._options.num_replicas,
            period_s=math.inf if named.is_static else self._options.period_s,
            host_bytes=self._host_bytes,
            device_bytes=self._has.device_bytes,
            num_slots=num_slots,
            seed=seed,
            demand=named.demand(num_slots),
            first_demand=demand(workload[0].arrival_s) if self._options.warm else None,
            known_demand=demand if policy.knows_future else None,
        )

    def _operating_points(self) -> Mapping[int, float]:
        if self._points is None:
            self._points = operating_points(self._profile, self._workload, self._options.replay)
        return self._points


def shuffled(workload: Sequence[WorkloadRequest], seed: int) -> Sequence[WorkloadRequest]:
    """Return a similar workload, in which requests that arrive within ten seconds change places. Bursts,
    drift and popularity stay. Seed 0 is the workload itself."""
    if seed == 0:
        return workload
    rng = random.Random(seed)
    made: list[WorkloadRequest] = []
    first = 0
    while first < len(workload):
        end_s = workload[first].arrival_s + _SHUFFLE_S
        last = first
        while last < len(workload) and workload[last].arrival_s < end_s:
            last += 1
        window = list(workload[first:last])
        others = rng.sample(window, len(window))
        made += [replace(other, arrival_s=each.arrival_s) for each, other in zip(window, others, strict=True)]
        first = last
    return made


def _reported(
    workload: Sequence[WorkloadRequest], report: Callable[[float], None]
) -> Iterator[WorkloadRequest]:
    every = max(len(workload) // _NUM_REPORTS, 1)
    for number, request in enumerate(workload):
        if number and number % every == 0:
            report(number / len(workload))
        yield request


def at_rate(workload: Sequence[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """Return the same requests, `factor` times as fast from the first arrival on."""
    first_s = workload[0].arrival_s
    return [replace(each, arrival_s=first_s + (each.arrival_s - first_s) / factor) for each in workload]


class BaseTimes(NamedTuple):
    """Mean times of requests that the base model serves one at a time. `tpt_s`: seconds per token, from
    arrival to the last token. `tpot_s`: seconds per token after the first."""

    tpt_s: float
    tpot_s: float


def base_times(profile: Profile, workload: Sequence[WorkloadRequest], options: ReplayOptions) -> BaseTimes:
    """Return the times of requests served one at a time by the base model on an idle engine: the reference of
    an SLO such as 1.5x."""
    rng = random.Random(0)
    alone = replace(options, num_adapters=0, until_s=math.inf)
    chosen = rng.sample(workload, min(len(workload), _NUM_ALONE))
    runs = [replay(profile, [replace(each, arrival_s=0.0, adapter=0)], alone).requests[0] for each in chosen]
    tpt_s = _mean(run.tpt_s for run in runs)
    assert tpt_s is not None, "an idle engine serves them"
    tpot_s = _mean(run.tpot_s for run in runs)
    return BaseTimes(tpt_s, tpt_s if tpot_s is None else tpot_s)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
