"""The digital-twin paper's random baseline."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.packing.packer import check_num_gpus
from loraplex.planner.plan import GpuPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomPacking:
    """Puts each adapter on a GPU drawn uniformly, and draws the slots of a GPU from 1 to its adapters.

    No judge is asked, so the plan may starve. The same seed draws the same."""

    seed: int
    has_slots: bool = True

    def pack(self, demand: Demand, num_gpus: int) -> tuple[GpuPlan, ...]:
        check_num_gpus(num_gpus)
        random = Random(self.seed)
        groups: list[list[AdapterDemand]] = [[] for _ in range(num_gpus)]
        for adapter in demand.adapters:
            groups[random.randrange(num_gpus)].append(adapter)
        return tuple(
            GpuPlan(
                adapters=tuple(group), num_slots=random.randint(1, len(group)) if self.has_slots else None
            )
            for group in groups
            if group
        )
