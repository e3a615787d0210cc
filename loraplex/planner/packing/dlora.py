"""dLoRA's proactive placement as a packer, for comparison: the fleet's own policy, asked for a plan.

It raises burst tolerance, not utilisation: adapters have copies on several GPUs, all GPUs are used, and
starvation is not considered, so the plan may starve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.placements.burst_tolerance import BurstTolerancePlacement
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.judge import Verdict
from loraplex.planner.packing.packer import check_num_gpus, starves_alone
from loraplex.planner.plan import GpuPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class DLoraPacking:
    """Places adapters by burst tolerance. An adapter with several copies is on each of their GPUs, with an
    equal part of its rate. An engine with slots has as many as adapters, each for the largest rank.

    `memory`: for adapters and requests on a GPU, in any unit; `memory_of_rank`: what an adapter of this rank
    takes, in the same unit."""

    memory: int
    memory_of_rank: Callable[[int], int]
    has_slots: bool = True

    def pack(self, demand: Demand, num_gpus: int) -> tuple[GpuPlan, ...]:
        check_num_gpus(num_gpus)
        if not demand.adapters:
            return ()
        plan = BurstTolerancePlacement().place(self._problem(demand, num_gpus))
        groups: list[list[AdapterDemand]] = [[] for _ in range(num_gpus)]
        for adapter, replicas, shares in zip(demand.adapters, plan.replicas, plan.shares, strict=True):
            for replica, share in zip(replicas, shares, strict=True):
                groups[replica].append(replace(adapter, rate_rps=adapter.rate_rps * share))
        return tuple(
            GpuPlan(adapters=tuple(each), num_slots=len(each) if self.has_slots else None)
            for each in groups
            if each
        )

    def _problem(self, demand: Demand, num_gpus: int) -> PlacementProblem:
        largest = max(demand.adapters, key=lambda each: each.rank)
        if self.memory_of_rank(largest.rank) > self.memory:
            raise starves_alone(largest, demand, Verdict(0.0, True))
        ranks = [each.rank for each in demand.adapters]
        held = [largest.rank] * len(ranks) if self.has_slots else ranks
        return PlacementProblem(
            adapters=AdapterSizes.of(ranks=ranks, num_bytes=[self.memory_of_rank(each) for each in held]),
            num_replicas=num_gpus,
            demand=np.array([demand.offered_tok_s([each]) for each in demand.adapters]),
            device_bytes=self.memory,
        )
