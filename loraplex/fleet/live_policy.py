"""Policies for live fleets: which are possible, and the controller for one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from loraplex.core.errors import UserError
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.live_controller import LiveController
from loraplex.fleet.migration.migrate import Migrator
from loraplex.fleet.migration.trigger import PERIOD_S as MIGRATION_PERIOD_S
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.placements.token_rates import token_rates
from loraplex.fleet.plan import Plan
from loraplex.fleet.policy import AUTO, ORACLE, PLACEMENTS, NamedPlacement, PlacementContext, Policy
from loraplex.fleet.replanner import Replanner
from loraplex.fleet.routers.named import router_named
from loraplex.fleet.view import FleetView

_STAY_S: Final = 30.0
"""Seconds that a request stays on a replica after it migrated: each move costs its client a pause."""


def check_live_policy(policy: Policy, *, shares_memory: bool) -> None:
    """Raise UserError for a policy that a live fleet cannot use; the message names one that it can.
    `shares_memory`: adapters and KV cache share the memory of a device, whose size is known."""
    if policy.knows_future:
        raise UserError(
            f"{ORACLE} knows what will come, as only a simulation can; serve with --routing {AUTO}"
        )
    named = PLACEMENTS[policy.placement]
    if named is None:
        return
    if named.needs_points:
        raise UserError(
            f"the placement {policy.placement} goes by what a replica sustains of each rank, which is found "
            "by simulating a workload for minutes, and again for each rank that is loaded; serve with "
            f"--placement {AUTO}, which goes by the cost model alone"
        )
    if named.needs_device_bytes and not shares_memory:
        raise UserError(
            f"the placement {policy.placement} is about memory of a GPU that adapters share with the KV "
            f"cache, and there is none here whose size is known; serve with --placement {AUTO}"
        )


def live_controller(
    policy: Policy, view: FleetView, *, period_s: float, pads: bool, device_bytes: int | None, now_s: float
) -> LiveController:
    """Return the controller of a fleet that has no adapters yet. `pads`: kernels compute every adapter with
    the largest rank. `device_bytes`: memory shared by adapters and KV cache; None if they share none.

    Host memory is unlimited here: a replica reads what it does not hold from disk.
    """
    named = PLACEMENTS[policy.placement]
    migrator = Migrator(period_s=min(period_s, MIGRATION_PERIOD_S), stay_s=_STAY_S)
    return LiveController(
        view=view,
        router=router_named(policy.routing),
        planner=None if named is None else _planner(named, view, period_s, device_bytes, pads=pads),
        migrator=migrator if policy.migrates else None,
        now_s=now_s,
    )


def _planner(
    named: NamedPlacement, view: FleetView, period_s: float, device_bytes: int | None, *, pads: bool
) -> Replanner:
    return Replanner(
        _ByPresentCosts(named=named, view=view, pads=pads),
        adapters=AdapterSizes.of(ranks=(), num_bytes=()),
        num_replicas=view.load.num_replicas,
        period_s=math.inf if named.is_static else period_s,
        device_bytes=device_bytes,
        num_slots=view.load.num_slots,
        demand=named.demand(view.load.num_slots),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _ByPresentCosts:
    """A placement by the costs of the present adapters: their ranks come and go with them."""

    named: NamedPlacement
    view: FleetView
    pads: bool

    def place(self, problem: PlacementProblem) -> Plan:
        context = PlacementContext(
            operating_points={},
            token_rates=token_rates(self.view.costs, problem.adapters.ranks.tolist()),
            padded=self.pads,
        )
        return self.named.make(context).place(problem)
