"""Packers that are told to leave room fill GPUs less."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.headroom import HeadroomJudge
from loraplex.planner.judge import Verdict
from loraplex.planner.packing.max_pack import MaxPack


class TenRequests:
    """Any GPU serves ten requests per second."""

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        rate_rps = sum(each.rate_rps for each in adapters)
        return Verdict(min(rate_rps, 10.0), rate_rps > 10.0)

    def fits(self, max_rank: int, num_slots: int) -> bool:
        return True


@pytest.mark.parametrize(("share", "num_gpus"), [(0.0, 4), (0.5, 6), (1.0, 8)])
def test_gpus_are_filled_up_to_the_room(share: float, num_gpus: int) -> None:
    adapters = tuple(AdapterDemand(name=str(number), rank=8, rate_rps=0.625) for number in range(64))
    demand = Demand(adapters=adapters, prompt_tokens=1.0, output_tokens=1.0)
    plan = MaxPack(judge=HeadroomJudge(TenRequests(), share), has_slots=True).pack(demand, 64)
    assert sorted(each.name for gpu in plan for each in gpu.adapters) == sorted(
        each.name for each in adapters
    )
    assert all(each.rate_rps == 0.625 for gpu in plan for each in gpu.adapters), "rates are as asked for"
    assert len(plan) >= num_gpus
    assert all(sum(each.rate_rps for each in gpu.adapters) <= 10.0 / (1.0 + share) for gpu in plan)
