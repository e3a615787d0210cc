"""The demand of a workload that is known beforehand."""

from __future__ import annotations

from loraplex.twin.foresight import Foresight
from loraplex.workload.jsonl import WorkloadRequest


def test_demand_is_of_the_next_minute() -> None:
    asked = ((0.0, 0, 50), (59.0, 2, 20), (60.0, 1, 110), (90.0, 1, 110), (120.0, 0, 1))
    foresight = Foresight(
        [
            WorkloadRequest(arrival_s=arrival_s, adapter=adapter, prompt_tokens=prompt, output_tokens=10)
            for arrival_s, adapter, prompt in asked
        ],
        num_adapters=4,
    )
    assert foresight.demand(0.0).tolist() == [1.0, 0.0, 0.5, 0.0]
    assert foresight.demand(60.0).tolist() == [0.0, 4.0, 0.0, 0.0]
    assert foresight.demand(1000.0).tolist() == [0.0] * 4
