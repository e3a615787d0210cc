"""Nobody's first token comes later than the bound allows, in traffic that a replica cannot serve in time."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.batching import dlora_costs, of_functions, stream
from loraplex.core.batching import Batching, DelayBound
from loraplex.twin.replay import ReplayOptions, replay

BOUND = DelayBound()
OPTIONS = ReplayOptions(num_adapters=8, ranks=(8,), max_running=16, staged=True)


def test_first_tokens_come_within_the_bound() -> None:
    workload = stream(2, 6.0, of_functions(8), 400)
    fcfs = replay(dlora_costs(), workload, OPTIONS)
    for batching in (Batching.GROUPED, Batching.AUTO):
        found = replay(dlora_costs(), workload, replace(OPTIONS, batching=batching))
        for one, other in zip(found.requests, fcfs.requests, strict=True):
            assert one.ttft_s is not None
            assert other.ttft_s is not None
            assert one.ttft_s - other.ttft_s <= BOUND.allowed_s(other.ttft_s), (batching, one.request)
        if batching is Batching.AUTO:
            assert found.num_pauses > 0, "nothing was paused, so nothing is shown"
