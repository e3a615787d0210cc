"""The digital-twin paper's baselines MaxBase and MaxBase*, which know the base model but no adapters.

A GPU gets adapters until their requests are as many tokens per second as the base model serves at most, as
measured without adapters. Neither what adapters cost nor what memory their slots need is considered, so the
plans may starve, or not start at all: that is what they are compared for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.judge import Verdict
from loraplex.planner.packing.packer import check_num_gpus, starves_alone, too_few_gpus
from loraplex.planner.plan import GpuPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxBase:
    """Fills GPUs in the order of the demand.

    `base_tok_s`: the most tokens per second, of prompts and answers, that the base model serves;
    `slots_per_adapter`: 1 for MaxBase, 0.5 for MaxBase*, None for an engine without slots."""

    base_tok_s: float
    slots_per_adapter: float | None = 1.0

    def pack(self, demand: Demand, num_gpus: int) -> tuple[GpuPlan, ...]:
        check_num_gpus(num_gpus)
        groups: list[list[AdapterDemand]] = []
        room_tok_s = 0.0
        for adapter in demand.adapters:
            offered_tok_s = adapter.rate_rps * demand.request_tokens
            if offered_tok_s > self.base_tok_s:
                raise starves_alone(adapter, demand, Verdict(self.base_tok_s, True))
            if not groups or offered_tok_s > room_tok_s:
                groups.append([])
                room_tok_s = self.base_tok_s
            groups[-1].append(adapter)
            room_tok_s -= offered_tok_s
        plans = tuple(GpuPlan(adapters=tuple(each), num_slots=self._num_slots(len(each))) for each in groups)
        if len(groups) > num_gpus:
            num_left = sum(map(len, groups[num_gpus:]))
            raise too_few_gpus(num_gpus, num_left, len(demand.adapters), plans)
        return plans

    def _num_slots(self, num_adapters: int) -> int | None:
        return None if self.slots_per_adapter is None else math.ceil(num_adapters * self.slots_per_adapter)
