"""How many tokens per second one replica sustains of each rank alone, found in the twin.

The operating points that LoRAServe's placement divides work by: the highest rate of requests, of the lengths
that the workload has, at which the P95 of the time to the first token stays within the objective.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from loraplex.perf.cost_model import CostModel
from loraplex.twin.highest_rate import highest_rate
from loraplex.twin.replay import ReplayOptions, replay
from loraplex.workload.jsonl import WorkloadRequest

TTFT_S: Final = 10.0
"""LoRAServe's objective for the P95 of the time to the first token."""
_NUM_REQUESTS: Final = 400
_NUM_ADAPTERS: Final = 8
_TOLERANCE: Final = 0.05


def operating_points(
    profile: CostModel,
    workload: Sequence[WorkloadRequest],
    options: ReplayOptions,
    *,
    ttft_s: float = TTFT_S,
) -> dict[int, float]:
    """Return tokens/s, of prompts and answers, by rank."""
    rng = random.Random(0)
    sample = [rng.choice(workload) for _ in range(_NUM_REQUESTS)]
    gaps = [rng.expovariate(1.0) for _ in sample]
    tokens = sum(each.prompt_tokens + each.output_tokens for each in sample) / len(sample)
    points: dict[int, float] = {}
    guess = 10.0
    for rank in sorted(set(options.ranks)):
        alone = replace(options, ranks=(rank,), num_adapters=_NUM_ADAPTERS, num_slots=None, staged=True)

        def holds(rate: float, alone: ReplayOptions = alone) -> bool:
            summary = replay(profile, _at_rate(sample, gaps, rate), alone).summary()
            ttft = summary["ttft_s"]
            return ttft is not None and bool(ttft["p95"] <= ttft_s)

        found = highest_rate(holds, guess, _TOLERANCE)
        guess = found or guess
        points[rank] = guess * tokens
    return points


def _at_rate(sample: Sequence[WorkloadRequest], gaps: Sequence[float], rate: float) -> list[WorkloadRequest]:
    """The same requests at exponential gaps, each on one of a few adapters in turn."""
    requests, now_s = [], 0.0
    for number, (each, gap) in enumerate(zip(sample, gaps, strict=True)):
        now_s += gap / rate
        requests.append(replace(each, arrival_s=now_s, adapter=number % _NUM_ADAPTERS))
    return requests
