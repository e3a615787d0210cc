"""Placement of adapters on engines with slots."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.placements.hysteresis import HysteresisPlacement
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.placements.rank_line import RankLinePlacement
from loraplex.fleet.placements.slot_packing import SlotPackingPlacement, expected_loads
from loraplex.fleet.plan import Plan
from loraplex.fleet.policy import PLACEMENTS, PlacementContext
from loraplex.fleet.replanner import Replanner


def problem(
    demand: list[float], num_replicas: int, num_slots: int, previous: Plan | None = None
) -> PlacementProblem:
    return PlacementProblem(
        adapters=AdapterSizes.of(ranks=[8] * len(demand), num_bytes=[1000] * len(demand)),
        num_replicas=num_replicas,
        demand=np.array(demand, dtype=float),
        num_slots=num_slots,
        previous=previous,
    )


def zipf(count: int) -> list[float]:
    return [1.0 / place for place in range(1, count + 1)]


def adapters_on(plan: Plan, replica: int) -> set[int]:
    return {adapter for adapter, replicas in enumerate(plan.replicas) if replica in replicas}


def test_those_asked_for_most_keep_their_slots() -> None:
    plan = SlotPackingPlacement().place(problem(zipf(24), 3, 4))
    groups = sorted((adapters_on(plan, replica) for replica in range(3)), key=len)
    assert groups[0] | groups[1] == set(range(8))
    assert groups[2] == set(range(8, 24))


def test_nothing_is_loaded_twice_where_all_have_a_slot() -> None:
    wanted = problem([5.0, 4.0, 3.0, 3.0, 2.0, 1.0], 3, 2)
    plan = SlotPackingPlacement().place(wanted)
    assert expected_loads(plan, wanted) == 0.0


def test_one_that_is_too_much_for_a_replica_is_on_several() -> None:
    plan = SlotPackingPlacement().place(problem([100.0, 1.0, 1.0, 1.0], 3, 2))
    assert plan.replicas[0] == (0, 1, 2)
    assert plan.shares[0] == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_without_demand_all_have_as_many() -> None:
    plan = SlotPackingPlacement().place(problem([1.0] * 24, 3, 4))
    assert [len(adapters_on(plan, replica)) for replica in range(3)] == [8, 8, 8]


@given(
    demand=st.lists(st.floats(0, 100), min_size=1, max_size=40),
    num_replicas=st.integers(1, 6),
    num_slots=st.integers(1, 8),
)
def test_every_adapter_is_placed_and_no_replica_has_much_more_than_its_share(
    demand: list[float], num_replicas: int, num_slots: int
) -> None:
    wanted = problem(demand, num_replicas, num_slots)
    plan = SlotPackingPlacement().place(wanted)
    plan.check(len(demand), num_replicas)
    loads = np.zeros(num_replicas)
    for entry, tokens_per_s in zip(plan.entries(), demand, strict=True):
        for replica, share in zip(*entry, strict=True):
            loads[replica] += share * tokens_per_s
    largest = max(share * d for e, d in zip(plan.entries(), demand, strict=True) for share in e.shares)
    fair = sum(demand) / num_replicas
    assert loads.max() <= 1.2 * fair + largest + 0.1 * (fair + 1e-9)
    assert 0.0 <= expected_loads(plan, wanted) <= 1.0
    assert SlotPackingPlacement().place(wanted) == plan


def test_expected_loads_are_those_of_slots_that_keep_what_was_used_last() -> None:
    wanted = problem(zipf(24), 3, 4)
    for plan in (SlotPackingPlacement().place(wanted), Plan.of_homes(np.arange(24) % 3)):
        rng, homes = np.random.default_rng(0), [replicas[0] for replicas in plan.replicas]
        asked = rng.choice(24, size=20_000, p=wanted.demand / wanted.demand.sum())
        slots: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(3)]
        num_loads = 0
        for adapter in asked.tolist():
            held = slots[homes[adapter]]
            if adapter not in held:
                num_loads += 1
                if len(held) == 4:
                    held.popitem(last=False)
            held[adapter] = None
            held.move_to_end(adapter)
        assert expected_loads(plan, wanted) == pytest.approx(num_loads / len(asked), abs=0.01)


def test_a_plan_is_kept_until_a_fresh_one_saves_loads() -> None:
    placement = HysteresisPlacement(placement=SlotPackingPlacement())
    apart = Plan.of_homes(np.arange(24) % 3)
    saving = placement.place(problem(zipf(24), 3, 4, previous=apart))
    assert saving != apart, "as busy as before, with half the loads"
    drifted = [*zipf(23), 0.05]
    assert placement.place(problem(drifted, 3, 4, previous=saving)) is saving


TREND, MEAN = 3.0, 1.5


@pytest.mark.parametrize(
    ("placement", "num_slots", "expected"),
    [("auto", None, TREND), ("auto", 4, MEAN), ("loraserve", None, TREND), ("loraserve", 4, TREND)],
)
def test_a_placement_says_what_demand_it_goes_by(
    placement: str, num_slots: int | None, expected: float
) -> None:
    """It is the trend of the periods; `auto` uses their mean if there are slots."""
    named = PLACEMENTS[placement]
    assert named is not None
    asked: list[list[float]] = []

    class Seen:
        def place(self, problem: PlacementProblem) -> Plan:
            asked.append(problem.demand.tolist())
            assert problem.num_slots == num_slots
            return Plan.of_homes(np.zeros(2, dtype=np.int64))

    table = AdapterSizes.of(ranks=[8, 8], num_bytes=[1000, 1000])
    planner = Replanner(
        Seen(), adapters=table, num_replicas=2, num_slots=num_slots, demand=named.demand(num_slots)
    )
    plan = planner.place(None, since_s=0.0, now_s=0.0)
    for period, tokens in enumerate((60, 120)):
        planner.count(0, tokens)
        plan = planner.place(plan, since_s=60.0 * period, now_s=60.0 * (period + 1))
    assert asked[-1] == pytest.approx([expected, 0.0])


def test_auto_packs_slots_where_there_are_any() -> None:
    context = PlacementContext(operating_points={}, token_rates={8: 100.0}, padded=True)
    named = PLACEMENTS["auto"]
    assert named is not None
    wanted = problem(zipf(24), 3, 4)
    assert named.make(context).place(wanted) == SlotPackingPlacement().place(wanted)
    shared = replace(wanted, num_slots=None)
    rank_line = RankLinePlacement(token_rates=context.token_rates, padded=True)
    assert named.make(context).place(shared) == rank_line.place(shared)


def test_a_fresh_plan_moves_as_few_as_it_can() -> None:
    before = SlotPackingPlacement().place(problem(zipf(24), 3, 4))
    demand = zipf(24)
    demand[7], demand[8] = demand[8], demand[7] + 0.01  # one that kept a slot, and one that did not
    after = SlotPackingPlacement().place(problem(demand, 3, 4, previous=before))
    moved = [a for a in range(24) if before.replicas[a] != after.replicas[a]]
    assert set(moved) <= {7, 8}
