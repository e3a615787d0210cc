"""A fleet's policy by its name: ROUTING+PLACEMENT[+migrate], as commands and results spell it.

A routing alone places adapters everywhere, except `auto`, which has its own placement. `oracle` is `auto` in
a simulation that knows the lengths of answers and the demand of the next period: it shows what this knowledge
gains, and is no bound on what any policy can reach.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from loraplex.core.errors import UserError
from loraplex.core.words import unknown_name
from loraplex.fleet.placements.burst_tolerance import BurstTolerancePlacement
from loraplex.fleet.placements.contiguous import ContiguousPlacement
from loraplex.fleet.placements.demand import Demand, extrapolated_demand, mean_demand
from loraplex.fleet.placements.hysteresis import HysteresisPlacement
from loraplex.fleet.placements.loraserve import LoRAServePlacement
from loraplex.fleet.placements.placement import Placement, PlacementProblem
from loraplex.fleet.placements.random_placement import RandomPlacement
from loraplex.fleet.placements.rank_line import RankLinePlacement
from loraplex.fleet.placements.slot_packing import SlotPackingPlacement
from loraplex.fleet.plan import Plan
from loraplex.fleet.routers.named import ROUTERS

AUTO: Final = "auto"
ORACLE: Final = "oracle"
MIGRATE: Final = "migrate"
EVERYWHERE: Final = "everywhere"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementContext:
    """The figures that some placements need. `operating_points`: tokens/s that one replica sustains, by rank.
    `token_rates`: an estimate of these (module `token_rates`)."""

    operating_points: Mapping[int, float]
    token_rates: Mapping[int, float]
    padded: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedPlacement:
    """A placement policy. `is_static`: made once. `needs_points`: needs operating points.
    `needs_device_bytes`: needs the size of the memory that adapters share with the KV cache. `slot_demand`:
    the prediction of demand for engines with slots; for others it is the trend of the last periods."""

    make: Callable[[PlacementContext], Placement]
    is_static: bool = False
    needs_points: bool = False
    needs_device_bytes: bool = False
    slot_demand: Demand = extrapolated_demand

    def demand(self, num_slots: int | None) -> Demand:
        """Return the function that predicts demand from the last periods. `num_slots`: None if engines have
        none."""
        return extrapolated_demand if num_slots is None else self.slot_demand


def _loraserve(context: PlacementContext) -> Placement:
    points, padded = context.operating_points, context.padded
    return _steady(LoRAServePlacement(operating_points=points, padded=padded), points, padded=padded)


def _auto(context: PlacementContext) -> Placement:
    rates, padded = context.token_rates, context.padded
    return _BySlots(
        packed=_steady(SlotPackingPlacement(), rates, padded=padded),
        shared=_steady(RankLinePlacement(token_rates=rates, padded=padded), rates, padded=padded),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _BySlots:
    """A placement that is `packed` if engines have slots for adapters, and `shared` if they share memory."""

    packed: Placement
    shared: Placement

    def place(self, problem: PlacementProblem) -> Plan:
        return (self.shared if problem.num_slots is None else self.packed).place(problem)


def _steady(placement: Placement, points: Mapping[int, float], *, padded: bool) -> Placement:
    return HysteresisPlacement(placement=placement, operating_points=points, padded=padded)


PLACEMENTS: Final[Mapping[str, NamedPlacement | None]] = {
    EVERYWHERE: None,
    "contiguous": NamedPlacement(make=lambda context: ContiguousPlacement(), is_static=True),
    "random": NamedPlacement(make=lambda context: RandomPlacement(), is_static=True),
    "burst-tolerance": NamedPlacement(
        make=lambda context: HysteresisPlacement(placement=BurstTolerancePlacement()),
        needs_device_bytes=True,
    ),
    "loraserve": NamedPlacement(make=_loraserve, needs_points=True),
    # The value of a slot shows only over all periods; following a shorter trend would keep moving adapters.
    AUTO: NamedPlacement(make=_auto, slot_demand=mean_demand),
}
"""Placements by name. None: every replica serves every adapter, and nothing has to be planned."""
ROUTINGS: Final = (*ROUTERS, ORACLE)
"""All routings that may be requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A routing and a placement. `migrates`: requests may move away from overloaded replicas. `knows_future`:
    the length of every answer and the demand of the next period are known."""

    routing: str
    placement: str = EVERYWHERE
    migrates: bool = False
    knows_future: bool = False

    def __post_init__(self) -> None:
        if self.routing not in ROUTERS:
            if self.routing in PLACEMENTS:
                raise UserError(
                    f"{self.routing!r} is a placement, and a routing is wanted here; write it behind one, "
                    f"as in {AUTO}+{self.routing}, or give it with --placement"
                )
            raise UserError(unknown_name("routing", self.routing, ROUTINGS))
        if self.placement not in PLACEMENTS:
            if self.placement in ROUTINGS:
                raise UserError(
                    f"{self.placement!r} is a routing, and a placement is wanted here; write it first, as in "
                    f"{self.placement}+{EVERYWHERE}, or give it with --routing"
                )
            raise UserError(unknown_name("placement", self.placement, PLACEMENTS))

    @classmethod
    def of(cls, routing: str, placement: str | None = None, *, migrates: bool = False) -> Policy:
        """Return the policy. `placement`: None for the routing's default."""
        knows_future = routing == ORACLE
        routing = AUTO if knows_future else routing
        default = AUTO if routing == AUTO else EVERYWHERE
        return cls(
            routing=routing,
            placement=default if placement is None else placement,
            migrates=migrates,
            knows_future=knows_future,
        )

    @classmethod
    def of_name(cls, name: str) -> Policy:
        """Return the policy with this name. Raises UserError for an invalid name."""
        routing, *rest = name.split("+")
        migrates = rest[-1:] == [MIGRATE]
        placements = rest[:-1] if migrates else rest
        if placements and _is_near_migrate(placements[-1]):
            kept = [each for each in placements if not _is_near_migrate(each)]
            raise UserError(f"{name!r} is no policy; did you mean {'+'.join((routing, *kept, MIGRATE))}?")
        if len(placements) > 1:
            raise UserError(
                f"{name!r} is no policy; write ROUTING+PLACEMENT or ROUTING+PLACEMENT+{MIGRATE}, such as "
                "most-idle+everywhere"
            )
        return cls.of(routing, placements[0] if placements else None, migrates=migrates)

    @property
    def name(self) -> str:
        """The name of the policy; `auto` stands for our recommended routing and placement."""
        routing = ORACLE if self.knows_future else self.routing
        if self.routing == self.placement == AUTO and not self.migrates:
            return routing
        return f"{routing}+{self.placement}" + (f"+{MIGRATE}" if self.migrates else "")


def _is_near_migrate(name: str) -> bool:
    return difflib.get_close_matches(name.lower(), (*PLACEMENTS, MIGRATE), 1) == [MIGRATE]
