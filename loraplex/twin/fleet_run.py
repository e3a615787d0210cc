"""A workload on a simulated fleet, under a policy by its name."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from loraplex.core.errors import UserError
from loraplex.core.words import plural
from loraplex.fleet.adapter_table import AdapterTable
from loraplex.fleet.controller import Controller
from loraplex.fleet.load import FleetLoad, ReplicaLimits
from loraplex.fleet.migration.migrate import Migrator
from loraplex.fleet.policy import PLACEMENTS, PlacementContext, Policy
from loraplex.fleet.replanner import PERIOD_S, Replanner
from loraplex.fleet.routers.named import router_named
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.cost_model import CostModel, KernelKind
from loraplex.perf.named_profiles import Profile
from loraplex.perf.set_costs import StepSetCosts
from loraplex.perf.slot_profile import SlotProfile
from loraplex.twin.fleet import FleetOutcome, SimulatedFleet
from loraplex.twin.links import Links, LinkSpeed
from loraplex.twin.operating_points import operating_points
from loraplex.twin.paused_collector import paused_collector
from loraplex.twin.replay import (
    OwnEngines,
    ReplayOptions,
    check_options,
    check_workload,
    longest_of,
    replay,
)
from loraplex.workload.jsonl import WorkloadRequest

_NUM_ALONE: Final = 100
_UNBOUNDED: Final = 1 << 60
_SHUFFLE_S: Final = 10.0
"""Requests that come within so many seconds of each other are exchanged to make another workload like it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOptions:
    """The fleet that is simulated under any policy. `slo_s`: seconds per token that a request may take.
    `points`: tokens/s that a replica sustains, by rank; None to find them when a placement asks. `link`: over
    which replicas fetch adapters from each other's host memory; None if each reads them from its disk."""

    num_replicas: int
    replay: ReplayOptions
    slo_s: float | None = None
    period_s: float = PERIOD_S
    points: Mapping[int, float] | None = None
    link: LinkSpeed | None = None


class _ModelMoves:
    """Loads of adapters by the cost model: over a link, or from a file that the page cache holds."""

    def __init__(self, model: CostModel, num_bytes: Sequence[int], link: LinkSpeed | None) -> None:
        self._model = model
        self._bytes = num_bytes
        self._elsewhere_s = model.read_s if link is None else link.seconds

    def from_host_s(self, adapter: int) -> float:
        return self._model.copy_s(self._bytes[adapter])

    def from_elsewhere_s(self, adapter: int) -> float:
        return self._elsewhere_s(self._bytes[adapter])


class FleetRuns:
    """One workload on one kind of fleet, to be run under any number of policies."""

    def __init__(self, profile: Profile, workload: Sequence[WorkloadRequest], options: FleetOptions) -> None:
        """Raises UserError for what no fleet could run."""
        if options.num_replicas < 1:
            raise UserError(f"a fleet has at least one replica, not {options.num_replicas}")
        check_workload(workload, options.replay)
        check_options(profile, options.replay)
        if isinstance(profile, SlotProfile):
            raise UserError(
                "a fleet is of our own engines; the profile is of an engine with slots for adapters"
            )
        self._profile = profile
        self._workload = workload
        self._options = options
        replay_options = options.replay
        if options.link is not None:
            # What a host holds is the pool's to say: the engine's own cache of it must not say otherwise.
            replay_options = replace(replay_options, host_memory=_UNBOUNDED)
        self._engines = OwnEngines(profile, replay_options, longest=longest_of(workload))
        self._adapters = AdapterTable.of(ranks=self._engines.ranks, num_bytes=self._engines.sizes)
        self._points = options.points
        if options.link is not None:
            self._check_hosts()

    def _check_hosts(self) -> None:
        """Raise UserError if the hosts of all replicas together cannot hold every adapter."""
        memory, num_replicas = self._profile.memory, self._options.num_replicas
        assert memory is not None, "engines were made by it"
        host_bytes = self._options.replay.host_memory or memory.host_bytes
        needed, held = int(self._adapters.num_bytes.sum()), host_bytes * num_replicas
        if needed > held:
            raise UserError(
                f"{len(self._adapters):,} adapters take {needed:,} bytes, {needed - held:,} more than the "
                f"host memory of {num_replicas} {plural('replica', num_replicas)} holds; add replicas, or "
                "leave --link out to read adapters from disk"
            )

    def run(self, policy: Policy, seed: int = 0) -> FleetOutcome:
        """Simulate the workload, or for another seed than 0 one that is like it."""
        with paused_collector():
            return self._run(policy, seed)

    def _run(self, policy: Policy, seed: int) -> FleetOutcome:
        controller = self._controller(policy, seed)
        link, num_replicas = self._options.link, self._options.num_replicas
        links = None if link is None else Links(link, num_replicas)
        fleet = SimulatedFleet(self._engines, controller, self._options.replay.until_s, links)
        return fleet.run(shuffled(self._workload, seed))

    def _controller(self, policy: Policy, seed: int) -> Controller:
        options, profile = self._options, self._profile
        memory = profile.memory
        assert memory is not None, "engines were made by it"
        limits = ReplicaLimits(max_running=self._engines.max_running, kv_tokens=self._engines.kv_tokens)
        view = FleetView(
            load=FleetLoad([limits] * options.num_replicas),
            tiers=AdapterTiers(),
            costs=StepSetCosts(profile, rank_bytes=self._engines.rank_bytes),
            moves=_ModelMoves(profile, self._adapters.num_bytes.tolist(), options.link),
            slo_s=options.slo_s,
        )
        return Controller(
            adapters=self._adapters,
            view=view,
            router=router_named(policy.routing, seed),
            planner=self._planner(policy, seed),
            shares_adapters=options.link is not None,
            migrator=Migrator() if policy.migrates else None,
        )

    def _planner(self, policy: Policy, seed: int) -> Replanner | None:
        named = PLACEMENTS[policy.placement]
        if named is None:
            return None
        context = PlacementContext(
            operating_points=self._operating_points() if named.needs_points else {},
            padded=self._profile.kernels is KernelKind.PADDED,
        )
        memory = self._profile.memory
        assert memory is not None
        return Replanner(
            named.make(context),
            adapters=self._adapters,
            num_replicas=self._options.num_replicas,
            period_s=math.inf if named.is_static else self._options.period_s,
            host_bytes=memory.host_bytes,
            device_bytes=memory.arena_bytes,
            seed=seed,
        )

    def _operating_points(self) -> Mapping[int, float]:
        if self._points is None:
            self._points = operating_points(self._profile, self._workload, self._options.replay)
        return self._points


def shuffled(workload: Sequence[WorkloadRequest], seed: int) -> Sequence[WorkloadRequest]:
    """Return a workload like this one: requests that come within ten seconds change places. Bursts, drift and
    popularity stay. Seed 0 is the workload itself."""
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


def at_rate(workload: Sequence[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """Return the same requests, so many times as fast."""
    return [replace(each, arrival_s=each.arrival_s / factor) for each in workload]


def base_tpt_s(profile: CostModel, workload: Sequence[WorkloadRequest], options: ReplayOptions) -> float:
    """Return the mean time per token of requests that the base model serves one at a time on an idle engine:
    the yardstick of an SLO such as 1.5x."""
    rng = random.Random(0)
    alone = replace(options, num_adapters=0, until_s=math.inf)
    chosen = rng.sample(workload, min(len(workload), _NUM_ALONE))
    runs = (replay(profile, [replace(each, arrival_s=0.0, adapter=0)], alone) for each in chosen)
    return float(sum(run.summary()["tpt_s"]["mean"] for run in runs)) / len(chosen)
