"""Finds the tokens per second that one replica sustains with adapters of one rank, by simulation.

These are the operating points by which LoRAServe's placement divides work: the highest request rate, with the
workload's lengths, at which the P95 of TTFT stays within the objective.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from loraplex.core.errors import UserError
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.twin.highest_rate import highest_rate
from loraplex.twin.replay import ReplayOptions, replay
from loraplex.workload.jsonl import WorkloadRequest

TTFT_S: Final = 10.0
"""LoRAServe's objective for the P95 of TTFT."""
_DURATION_S: Final = 60.0
"""Seconds of arrivals in each run. A growing queue stays within ten seconds for a while, so all points are a
few percent too high, equally for all ranks; placements use only their ratios."""
_NUM_ADAPTERS: Final = 8
_TOLERANCE: Final = 0.05
_ANY: Final = 2.0
_NEXT_RANK: Final = 1.1
"""Factors between the rates tried: without prior knowledge, and starting from the point of the rank below,
which is expected to be close."""


def operating_points(
    profile: Profile,
    workload: Sequence[WorkloadRequest],
    options: ReplayOptions,
    *,
    ttft_s: float = TTFT_S,
    report: Callable[[int], object] = lambda rank: None,
) -> dict[int, float]:
    """Return prompt and output tokens/s by rank. `report`: called with each rank before it is measured."""
    tokens = sum(each.prompt_tokens + each.output_tokens for each in workload) / len(workload)
    points: dict[int, float] = {}
    guess, factor = 10.0, _ANY
    few = replace(options, num_adapters=_NUM_ADAPTERS, staged=True, until_s=math.inf)
    if not isinstance(profile, CostModel):  # slots cost the same whichever adapters are in them
        few = replace(few, num_slots=options.num_slots or options.num_adapters, slot_rank=max(options.ranks))
    for rank in sorted(set(options.ranks)):
        report(rank)
        alone = replace(few, ranks=(rank,))

        def holds(rate: float, alone: ReplayOptions = alone) -> bool:
            ttft = replay(profile, _at_rate(workload, rate), alone).summary()["ttft_s"]
            return ttft is not None and bool(ttft["p95"] <= ttft_s)

        found = highest_rate(holds, guess, _TOLERANCE, factor)
        if found in (None, math.inf) and factor < _ANY:
            found = highest_rate(holds, guess, _TOLERANCE, _ANY)
        if found is None or found == math.inf:
            raise UserError(
                f"no rate was found at which a replica just keeps first tokens within {ttft_s:g} s (P95) on "
                f"adapters of rank {rank}; the profile and the workload do not go together"
            )
        guess, factor = found, _NEXT_RANK
        points[rank] = found * tokens
    return points


def _at_rate(workload: Sequence[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """Return Poisson arrivals of requests drawn from the workload, on a few adapters in turn."""
    rng, now_s, number = random.Random(0), 0.0, 0
    requests: list[WorkloadRequest] = []
    while (now_s := now_s + rng.expovariate(rate)) < _DURATION_S or not requests:
        number += 1
        requests.append(replace(rng.choice(workload), arrival_s=now_s, adapter=number % _NUM_ADAPTERS))
    return requests
