"""Convert the state of a fleet's controller, in which adapters have numbers, to and from an event, in which
they have versions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.fleet.live_controller import ControllerState
from loraplex.fleet.plan import Entry, Plan
from loraplex.fleet.plan_change import Pending
from loraplex.fleet.replanner import Counted
from loraplex.perf.line import Line
from loraplex.server.fleet.routing_events import PendingAdapter, PlacedAdapter, PlanState


def placed_adapter(version: str, entry: Entry) -> PlacedAdapter:
    return PlacedAdapter(version=version, replicas=entry.replicas, shares=entry.shares)


def plan_state(state: ControllerState, versions: Mapping[int, str]) -> PlanState:
    """Return a state as an event. `versions`: versions of the adapters that are kept, by number."""
    counted = state.counted
    rates: dict[str, list[float]] = {}
    if counted is not None and counted.rates:
        table = np.stack(counted.rates)
        rates = {versions[n]: table[:, n].tolist() for n in versions if table[:, n].any()}
    return PlanState(
        since_s=state.since_s,
        place_s=state.place_s if math.isfinite(state.place_s) else None,
        has_counts=state.has_counts,
        serving=sorted(state.serving),
        plan=_placed(state.plan, versions),
        target=_placed(state.target, versions),
        pending=[
            PendingAdapter(
                placed=placed_adapter(versions[number], each.entry),
                waiting=sorted(each.waiting),
                failed=sorted(each.failed),
            )
            for number, each in state.pending.items()
            if number in versions
        ],
        num_periods=0 if counted is None else len(counted.rates),
        tokens={}
        if counted is None
        else {versions[n]: float(counted.tokens[n]) for n in versions if counted.tokens[n]},
        rates=rates,
        given=[placed_adapter(versions[n], entry) for n, entry in state.given.items() if n in versions],
        is_given_pending=state.is_given_pending,
        migrate_s=state.migrate_s,
        moved_s={str(request_id): at_s for request_id, at_s in state.moved_s.items()},
        executed_s=state.executed_s,
        prefill_s=(state.prefill.latency_s, state.prefill.unit_s),
        output_token_s=state.output_token_s,
    )


def controller_state(event: PlanState, numbers: Mapping[str, int]) -> ControllerState:
    """Return the state in an event, for adapters with these numbers."""

    def column(values: Iterable[tuple[str, float]]) -> FloatArray:
        found = np.zeros(len(numbers))
        for version, value in values:
            found[numbers[version]] = value
        return found

    periods = range(event.num_periods)
    rates = [column((version, each[period]) for version, each in event.rates.items()) for period in periods]
    return ControllerState(
        since_s=event.since_s,
        place_s=math.inf if event.place_s is None else event.place_s,
        has_counts=event.has_counts,
        serving=frozenset(event.serving),
        plan=_plan(event.plan),
        target=_plan(event.target),
        pending={
            numbers[each.placed.version]: Pending(
                entry=_entry(each.placed), waiting=set(each.waiting), failed=set(each.failed)
            )
            for each in event.pending
        },
        counted=Counted(column(event.tokens.items()), rates),
        given=given_entries(event.given, numbers),
        is_given_pending=event.is_given_pending,
        migrate_s=event.migrate_s,
        moved_s=dict(event.moved_s.items()),
        executed_s=event.executed_s,
        prefill=Line(latency_s=event.prefill_s[0], unit_s=event.prefill_s[1]),
        output_token_s=event.output_token_s,
    )


def given_entries(given: Iterable[PlacedAdapter], numbers: Mapping[str, int]) -> dict[int, Entry]:
    """Return the entries of a given placement by the adapters' numbers."""
    return {numbers[each.version]: _entry(each) for each in given}


def _placed(plan: Plan | None, versions: Mapping[int, str]) -> list[PlacedAdapter] | None:
    if plan is None:
        return None
    return [
        placed_adapter(versions[number], entry)
        for number, entry in enumerate(plan.entries())
        if number in versions
    ]


def _plan(placed: Sequence[PlacedAdapter] | None) -> Plan | None:
    """Return the plan, given its adapters in the order of their numbers."""
    return None if placed is None else Plan.of_entries([_entry(each) for each in placed])


def _entry(placed: PlacedAdapter) -> Entry:
    return Entry(placed.replicas, placed.shares)
