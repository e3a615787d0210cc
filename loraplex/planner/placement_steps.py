"""A plan as a placement of a fleet, and its difference from where the adapters are.

The steps are printed and priced before a plan is applied, and not carried out here: a fleet is handed the
whole placement, and moves each adapter by itself (`fleet/plan_change.py`), so that it always has a replica.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from loraplex.fleet.plan import Entry
from loraplex.planner.plan import Plan

Holders = Mapping[str, Set[int]]
"""The replicas that serve each adapter, by its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A change of one adapter's replicas: those that load it, and those that let it go."""

    adapter: str
    loads: frozenset[int]
    lets_go: frozenset[int]


def placement_of(plan: Plan) -> dict[str, Entry]:
    """Return the GPUs of each adapter, with shares of its requests as the rates planned there."""
    rates: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for number, gpu in enumerate(plan.gpus):
        for adapter in gpu.adapters:
            rates[adapter.name][number] = adapter.rate_rps
    return {
        name: Entry.of_weights(each if any(each.values()) else dict.fromkeys(each, 1.0))
        for name, each in rates.items()
    }


def holders_of(placement: Mapping[str, Entry]) -> dict[str, Set[int]]:
    """Return the replicas of each adapter."""
    return {name: frozenset(entry.replicas) for name, entry in placement.items()}


def steps_between(present: Holders, wanted: Holders) -> list[Step]:
    """Return the changes from the present placement to the wanted one, first those without loads.
    Adapters that are not wanted anywhere stay where they are."""
    steps = [
        Step(
            adapter=name,
            loads=frozenset(replicas - present.get(name, frozenset())),
            lets_go=frozenset(present.get(name, frozenset()) - replicas),
        )
        for name, replicas in wanted.items()
        if present.get(name, frozenset()) != replicas
    ]
    return sorted(steps, key=lambda step: (bool(step.loads), step.adapter))
