"""The digital-twin paper's variant for latency (ProposedLat), which spreads adapters over all GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace

from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.judge import Judge
from loraplex.planner.packing.packer import check_each, check_num_gpus
from loraplex.planner.plan import GpuPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastRate:
    """Puts each adapter, in the order of the demand, on the GPU with the lowest rate so far, among
    equals on the one with the fewest adapters.

    Each GPU gets as many slots as adapters. The judge is asked about each GPU when all adapters are placed,
    the one with the highest rate first."""

    judge: Judge
    has_slots: bool = True

    def pack(self, demand: Demand, num_gpus: int) -> tuple[GpuPlan, ...]:
        check_num_gpus(num_gpus)
        groups: list[list[AdapterDemand]] = [[] for _ in range(num_gpus)]
        least = [(0.0, 0, gpu) for gpu in range(num_gpus)]
        for adapter in demand.adapters:
            rate_rps, num_adapters, gpu = least[0]
            groups[gpu].append(adapter)
            heapreplace(least, (rate_rps + adapter.rate_rps, num_adapters + 1, gpu))
        plans = tuple(
            GpuPlan(adapters=tuple(each), num_slots=len(each) if self.has_slots else None)
            for each in groups
            if each
        )
        check_each(plans, demand, self.judge, num_gpus)
        return plans
