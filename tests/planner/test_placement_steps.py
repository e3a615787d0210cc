"""A plan as a placement, the steps from one to another, and their price."""

from __future__ import annotations

from collections.abc import Set

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import slot_profile

from loraplex.fleet.plan import Entry
from loraplex.planner.demand import AdapterDemand
from loraplex.planner.move_cost import AdapterSize, move_cost
from loraplex.planner.placement_steps import placement_of, steps_between
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


@given(
    st.dictionaries(st.sampled_from(NAMES), REPLICAS, min_size=1),
    st.dictionaries(st.sampled_from(NAMES), REPLICAS),
)
def test_steps_are_the_difference_of_two_placements(
    present: dict[str, Set[int]], wanted: dict[str, Set[int]]
) -> None:
    now = dict(present)
    steps = steps_between(present, wanted)
    for step in steps:
        held = now.get(step.adapter, frozenset())
        assert step.loads or step.lets_go, "a step changes something"
        assert not step.loads & held, "what is there is not loaded"
        assert step.lets_go <= held
        now[step.adapter] = held - step.lets_go | step.loads
    assert now == {**present, **wanted}
    assert len({step.adapter for step in steps}) == len(steps)
    assert not steps_between(now, wanted)


def test_steps_without_loads_come_first() -> None:
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
