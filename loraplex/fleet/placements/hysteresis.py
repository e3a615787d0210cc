"""A placement that leaves adapters where they are as long as that is good enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from loraplex.core.errors import UserError
from loraplex.fleet.placements.placement import Placement, PlacementProblem
from loraplex.fleet.placements.slot_packing import expected_loads
from loraplex.fleet.placements.utilisation import utilisation_by_replica
from loraplex.fleet.plan import Plan

_SAVED_LOADS: Final = 0.05
"""Share of all requests that must be saved a load by the fresh plan for adapters to be moved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HysteresisPlacement:
    """Places adapters again each period, but moves them only if it pays off.

    The criterion is the predicted utilisation of the busiest replica. The previous plan is kept while that is
    at most `1 + margin` times what the fresh plan would give, and while it fits the hosts. For engines with
    slots, it is also kept only while not many more requests have to wait for a load. Adapters that the
    previous plan lacks get the places of the fresh one."""

    placement: Placement
    margin: float = 0.1
    operating_points: Mapping[int, float] | None = None
    """Tokens/s that a replica sustains, by rank; None if all tokens count the same."""
    padded: bool = True
    """True if kernels pad to the largest rank in a batch."""

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise UserError(
                f"a margin of {self.margin:g} would move adapters for nothing; it must be 0 or more"
            )

    def place(self, problem: PlacementProblem) -> Plan:
        fresh = self.placement.place(problem)
        if problem.previous is None:
            return fresh
        kept = _completed(problem.previous, fresh)
        if not _fits(kept, problem):
            return fresh
        if problem.num_slots is not None:
            saved = expected_loads(kept, problem) - expected_loads(fresh, problem)
            if saved > _SAVED_LOADS:
                return fresh
        most_used = self._busiest(fresh, problem) * (1 + self.margin)
        return kept if self._busiest(kept, problem) <= most_used else fresh

    def _busiest(self, plan: Plan, problem: PlacementProblem) -> float:
        return float(utilisation_by_replica(plan, problem, self.operating_points, padded=self.padded).max())


def _completed(previous: Plan, fresh: Plan) -> Plan:
    """Return the previous plan, with the fresh plan's places for the adapters that it lacks."""
    num_placed = len(previous.replicas)
    if num_placed == len(fresh.replicas):
        return previous
    return Plan(
        replicas=previous.replicas + fresh.replicas[num_placed:],
        shares=previous.shares + fresh.shares[num_placed:],
    )


def _fits(plan: Plan, problem: PlacementProblem) -> bool:
    if problem.host_bytes is None:
        return True
    return int(plan.bytes_by_replica(problem.adapters, problem.num_replicas).max()) <= problem.host_bytes
