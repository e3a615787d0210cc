"""What a workload will ask for."""

from __future__ import annotations

from loraplex.twin.foresight import Foresight
from loraplex.workload.jsonl import WorkloadRequest


def test_demand_is_of_the_period_ahead() -> None:
    workload = [
        WorkloadRequest(arrival_s=arrival_s, adapter=adapter, prompt_tokens=prompt, output_tokens=10)
        for arrival_s, adapter, prompt in (
            (0.0, 0, 10),
            (4.9, 2, 20),
            (5.0, 1, 30),
            (9.0, 1, 0),
            (10.0, 0, 1),
        )
    ]
    foresight = Foresight(workload, num_adapters=4)
    assert foresight.demand(0.0, period_s=5.0).tolist() == [4.0, 0.0, 6.0, 0.0]
    assert foresight.demand(5.0, period_s=5.0).tolist() == [0.0, 10.0, 0.0, 0.0]
    assert foresight.demand(100.0, period_s=5.0).tolist() == [0.0] * 4
