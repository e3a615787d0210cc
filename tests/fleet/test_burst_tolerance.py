"""dLoRA's greedy placement computed by hand, and its invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from placement_problems import problem_of, problems

from loraplex.core.errors import UserError
from loraplex.fleet.placements.burst_tolerance import BurstTolerancePlacement
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan


def lowest_tolerance(plan: Plan, problem: PlacementProblem) -> float:
    """Compute the definition itself: device memory left where an adapter is, over its load."""
    assert problem.device_bytes is not None
    taken = plan.bytes_by_replica(problem.adapters, problem.num_replicas)
    left = np.maximum(problem.device_bytes - taken, 0)
    return min(
        (
            sum(left[list(replicas)]) / load
            for replicas, load in zip(plan.replicas, problem.demand, strict=True)
            if load > 0
        ),
        default=float("inf"),
    )


def test_the_least_tolerant_adapter_gets_copies() -> None:
    """First copies: adapter 0 on replica 0, 1 on 1, 2 on 0; 80 and 90 bytes are left, tolerances 10, 45, 80.
    A copy of adapter 0 on replica 1 leaves 80 bytes there: 20, 40, 80. It is on all replicas then."""
    problem = problem_of(
        ranks=[8] * 3, num_bytes=[10] * 3, demand=[8.0, 2.0, 1.0], num_replicas=2, device_bytes=100
    )
    plan = BurstTolerancePlacement().place(problem)
    assert plan == Plan(replicas=((0, 1), (1,), (0,)), shares=((0.5, 0.5), (1.0,), (1.0,)))


def test_no_copy_is_made_that_lowers_the_lowest_tolerance() -> None:
    """Tolerances are 10 / 5 and 10 / 4; a copy of adapter 0 would leave adapter 1 nothing."""
    problem = problem_of(
        ranks=[8] * 2, num_bytes=[10] * 2, demand=[5.0, 4.0], num_replicas=2, device_bytes=20
    )
    assert BurstTolerancePlacement().place(problem).replicas == ((0,), (1,))


def test_copies_need_room_on_the_host() -> None:
    """Two adapters of 10 bytes on each host leave no room for a third there."""
    for host_bytes, num_copies in ((29, 4), (30, 5)):
        problem = problem_of(
            ranks=[8] * 4,
            num_bytes=[10] * 4,
            demand=[8.0, 2.0, 1.0, 1.0],
            num_replicas=2,
            device_bytes=100,
            host_bytes=host_bytes,
        )
        assert BurstTolerancePlacement().place(problem).num_copies == num_copies


def test_without_device_memory_there_is_no_tolerance() -> None:
    with pytest.raises(UserError, match="memory that adapters share with the KV cache"):
        BurstTolerancePlacement().place(
            problem_of(ranks=[8], demand=[1.0], num_replicas=1, device_bytes=None)
        )


@given(problems())
def test_copies_never_lower_the_lowest_tolerance(problem: PlacementProblem) -> None:
    plan = BurstTolerancePlacement().place(problem)
    one_each = BurstTolerancePlacement().place(problem_without_copies(problem))
    assert lowest_tolerance(plan, problem) >= lowest_tolerance(one_each, problem)


def problem_without_copies(problem: PlacementProblem) -> PlacementProblem:
    """The same order of adapters, on devices without room for a second copy of any."""
    return PlacementProblem(
        adapters=problem.adapters,
        num_replicas=problem.num_replicas,
        demand=problem.demand,
        host_bytes=problem.host_bytes,
        device_bytes=0,
    )
