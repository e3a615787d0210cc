"""dLoRA's proactive placement as a packer, for comparison: the fleet's own policy, asked for a plan.

It raises burst tolerance, not utilisation: adapters have copies on several GPUs, all GPUs are used, and
starvation is not considered, so the plan may starve.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from loraplex.fleet.adapter_table import AdapterTable
from loraplex.fleet.placements.burst_tolerance import BurstTolerancePlacement
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.packing.packer import check_num_gpus
from loraplex.planner.plan import GpuPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class DLoraPacking:
    """Places adapters by burst tolerance. An adapter with several copies is on each of their GPUs, with an
    equal part of its rate. An engine with slots has as many as adapters, each for the largest rank.

    `device_bytes`: memory for adapters and requests on a GPU; `bytes_per_rank`: memory of an adapter, for
    each of its ranks."""

    device_bytes: int
    bytes_per_rank: int
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
        ranks = [each.rank for each in demand.adapters]
        held = [max(ranks)] * len(ranks) if self.has_slots else ranks
        largest = max(demand.adapters, key=lambda each: each.rank)
        if largest.rank * self.bytes_per_rank > self.device_bytes:
            raise PlanError(
                f"adapter {largest.name!r} (rank {largest.rank}) is larger than a GPU: it takes "
                f"{largest.rank * self.bytes_per_rank:,} bytes, and a GPU has {self.device_bytes:,} for "
                "adapters and requests; lower its rank, or take GPUs with more memory"
            )
        return PlacementProblem(
            adapters=AdapterTable.of(ranks=ranks, num_bytes=[each * self.bytes_per_rank for each in held]),
            num_replicas=num_gpus,
            demand=np.array([demand.offered_tok_s([each]) for each in demand.adapters]),
            device_bytes=self.device_bytes,
        )
