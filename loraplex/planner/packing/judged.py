"""Packers that ask no judge: what they pack is judged afterwards, and refused if it starves."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.planner.demand import Demand
from loraplex.planner.judge import Judge
from loraplex.planner.packing.packer import Packer, check_each
from loraplex.planner.plan import GpuPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Returns the plans of another packer that the judge finds good, to find the least number of GPUs."""

    packer: Packer
    judge: Judge

    def pack(self, demand: Demand, num_gpus: int) -> tuple[GpuPlan, ...]:
        """See `Packer`. Raises NotEnoughGpusError if a GPU starves."""
        plans = self.packer.pack(demand, num_gpus)
        check_each(plans, demand, self.judge, num_gpus)
        return plans
