"""Finds adapters that no GPU serves before a packer tries to place them."""

from __future__ import annotations

from loraplex.planner.demand import Demand
from loraplex.planner.judge import Judge
from loraplex.planner.packing.packer import no_room_for_slots, starves_alone
from loraplex.planner.packing.testing_points import SLOT_COUNTS


def check_hardest(demand: Demand, judge: Judge, *, has_slots: bool) -> None:
    """Raise PlanError if the largest adapter or the busiest is too much even for a GPU of its own.

    The packers that fill GPUs find these by themselves; others would only say that there are too few GPUs."""
    num_slots = SLOT_COUNTS[0] if has_slots else None
    if not demand.adapters:
        return
    largest = max(demand.adapters, key=lambda each: (each.rank, each.rate_rps))
    busiest = max(demand.adapters, key=lambda each: (each.rate_rps, each.rank))
    for adapter in dict.fromkeys((largest, busiest)):
        if num_slots is not None and not judge.fits(adapter.rank, num_slots):
            raise no_room_for_slots(adapter, num_slots)
        verdict = judge.judge([adapter], num_slots)
        if verdict.is_starved:
            raise starves_alone(adapter, demand, verdict)
