"""The steps from one placement to another, and their price."""

from __future__ import annotations

from collections.abc import Iterable, Set

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import slot_profile

from loraplex.fleet.plan import Entry
from loraplex.planner.demand import AdapterDemand
from loraplex.planner.move_cost import AdapterSize, move_cost
from loraplex.planner.placement_steps import Holders, Step, placement_of, steps_between
from loraplex.planner.plan import GpuPlan, Plan

NAMES = ("a", "b", "c", "d", "e")
REPLICAS = st.frozensets(st.integers(0, 3), min_size=1)


def plan_of(*gpus: dict[str, float]) -> Plan:
    """Return a plan of GPUs given as the rates of their adapters."""
    return Plan(
        gpus=tuple(
            GpuPlan(
                adapters=tuple(
                    AdapterDemand(name=name, rank=8, rate_rps=rate) for name, rate in rates.items()
                ),
                num_slots=None,
            )
            for rates in gpus
        ),
        profile="none",
        packer="by hand",
        prompt_tokens=10.0,
        output_tokens=10.0,
    )


def half_steps(present: Holders, steps: Iterable[Step]) -> list[dict[str, Set[int]]]:
    """Return the placement at first, when each adapter's new replicas have it, and when the old ones have let
    it go."""
    now = dict(present)
    states = [dict(now)]
    for step in steps:
        now[step.adapter] = now.get(step.adapter, frozenset()) | step.loads
        states.append(dict(now))
        now[step.adapter] = now[step.adapter] - step.lets_go
        states.append(dict(now))
    return states


@given(
    st.dictionaries(st.sampled_from(NAMES), REPLICAS, min_size=1),
    st.dictionaries(st.sampled_from(NAMES), REPLICAS),
    st.integers(0, 30),
)
def test_every_adapter_has_a_holder_all_the_way_and_from_anywhere(
    present: dict[str, Set[int]], wanted: dict[str, Set[int]], ended_after: int
) -> None:
    states = half_steps(present, steps_between(present, wanted))
    assert all(state[name] for state in states for name in present)
    assert states[-1] == {**present, **wanted}
    begun_again = states[min(ended_after, len(states) - 1)]
    assert half_steps(begun_again, steps_between(begun_again, wanted))[-1] == {**present, **wanted}
    assert not steps_between(states[-1], wanted)


def test_what_makes_room_comes_first() -> None:
    present = {"a": {0}, "b": {0, 1}, "c": {1}}
    steps = steps_between(present, {"a": {1}, "b": {1}, "c": {1}})
    assert [(step.adapter, set(step.loads), set(step.lets_go)) for step in steps] == [
        ("b", set(), {0}),
        ("a", {1}, {0}),
    ]


def test_copies_share_requests_as_planned() -> None:
    placement = placement_of(plan_of({"a": 3.0, "b": 0.0}, {"a": 1.0, "b": 0.0}, {"c": 0.0}))
    assert placement == {
        "a": Entry((0, 1), (0.75, 0.25)),
        "b": Entry((0, 1), (0.5, 0.5)),
        "c": Entry((2,), (1.0,)),
    }


def test_moves_cost_what_their_loads_take() -> None:
    profile = slot_profile()
    sizes = {name: AdapterSize(rank=rank, num_bytes=1000 * rank) for name, rank in (("a", 8), ("b", 16))}
    steps = steps_between({"a": {0}, "b": {0, 1}}, {"a": {1, 2}, "b": {1, 2}})
    cost = move_cost(steps, sizes, profile)
    of_a = profile.costs.load.predict(rank=8, from_disk=True)
    of_b = profile.costs.load.predict(rank=16, from_disk=True)
    assert (cost.num_moved, cost.num_loads, cost.num_bytes) == (2, 3, 32_000)
    assert cost.load_s == pytest.approx(2 * of_a + of_b)
    assert cost.longest_s == pytest.approx(of_a + of_b)
    assert move_cost([], sizes, profile).longest_s == 0
