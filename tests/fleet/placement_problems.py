"""Small fleets to place: written out by hand, or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.placements.burst_tolerance import BurstTolerancePlacement
from loraplex.fleet.placements.contiguous import ContiguousPlacement
from loraplex.fleet.placements.hysteresis import HysteresisPlacement
from loraplex.fleet.placements.loraserve import LoRAServePlacement
from loraplex.fleet.placements.placement import Placement, PlacementProblem
from loraplex.fleet.placements.random_placement import RandomPlacement
from loraplex.fleet.placements.rank_line import RankLinePlacement
from loraplex.fleet.plan import Plan

POINTS = {8: 400.0, 16: 350.0, 32: 300.0, 64: 200.0, 128: 100.0}
"""Operating points, in tokens/s."""

DIVIDING: dict[str, Placement] = {
    "contiguous": ContiguousPlacement(),
    "random": RandomPlacement(),
    "burst tolerance": BurstTolerancePlacement(),
    "loraserve": LoRAServePlacement(operating_points=POINTS),
    "loraserve, rank-proportional": LoRAServePlacement(operating_points=POINTS, padded=False),
    "rank line": RankLinePlacement(token_rates=POINTS, padded=True),
    "rank line, rank-proportional": RankLinePlacement(token_rates=POINTS, padded=False),
    "hysteresis": HysteresisPlacement(
        placement=LoRAServePlacement(operating_points=POINTS), operating_points=POINTS
    ),
}
"""All placements that divide adapters among replicas."""


def num_moves(plan: Plan, previous: Plan) -> int:
    """Return how many copies of a plan must be fetched, because the previous plan lacks them."""
    before = [*previous.replicas, *[()] * (len(plan.replicas) - len(previous.replicas))]
    return sum(len(set(now) - set(then)) for now, then in zip(plan.replicas, before, strict=True))


def problem_of(
    *,
    ranks: Sequence[int],
    demand: Sequence[float],
    num_replicas: int,
    num_bytes: Sequence[int] | None = None,
    host_bytes: int | None = None,
    device_bytes: int | None = 1000,
    previous: Plan | None = None,
    seed: int = 0,
) -> PlacementProblem:
    """Return the problem; without sizes an adapter takes a byte for each rank."""
    return PlacementProblem(
        adapters=AdapterSizes.of(ranks=ranks, num_bytes=ranks if num_bytes is None else num_bytes),
        num_replicas=num_replicas,
        demand=np.array(demand, dtype=np.float64),
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        previous=previous,
        seed=seed,
    )


@st.composite
def plans(draw: st.DrawFn, num_adapters: int, num_replicas: int) -> Plan:
    """Return any plan for a fleet of this size."""
    some = st.sets(st.integers(0, num_replicas - 1), min_size=1)
    return Plan.with_equal_shares([sorted(draw(some)) for _ in range(num_adapters)])


@st.composite
def problems(draw: st.DrawFn, *, max_replicas: int = 6, with_previous: bool = True) -> PlacementProblem:
    """Return a problem that can be placed, with or without memory bounds and an earlier plan."""
    num_adapters = draw(st.integers(1, 12))
    num_replicas = draw(st.integers(1, max_replicas))
    columns = st.lists(
        st.tuples(
            st.sampled_from(sorted(POINTS)),
            st.integers(1, 50),
            st.one_of(st.just(0.0), st.floats(1e-3, 1e3)),
        ),
        min_size=num_adapters,
        max_size=num_adapters,
    )
    ranks, sizes, demand = zip(*draw(columns), strict=True)
    # Room for the mean and for one adapter more is always enough: the emptiest replica has room for any.
    least_bytes = -(-sum(sizes) // num_replicas) + max(sizes)
    previous = None
    if with_previous and draw(st.booleans()):
        previous = draw(plans(draw(st.integers(0, num_adapters)), num_replicas))
    return problem_of(
        ranks=ranks,
        num_bytes=sizes,
        demand=demand,
        num_replicas=num_replicas,
        host_bytes=draw(st.one_of(st.none(), st.integers(least_bytes, 2 * least_bytes))),
        device_bytes=draw(st.integers(1, 1000)),
        previous=previous,
        seed=draw(st.integers(0, 3)),
    )
