"""Nobody's first token comes later than the bound allows, in traffic that a replica cannot serve in time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from benchmarks.batching import DLORA_RPS, OUR_RPS, dlora_costs, our_costs, skewed
from loraplex.core.batching import Batching, DelayBound
from loraplex.perf.cost_model import CostModel
from loraplex.twin.replay import ReplayOptions, replay

BOUND = DelayBound()
OPTIONS = ReplayOptions(num_adapters=8, ranks=(8,), max_running=16, staged=True)
CASES = list(product(range(4), (4, 8, 32)))
"""Seeds, and functions for each adapter."""


def check_bound(costs: CostModel, rate: float, stride: int, seed: int, num_requests: int) -> dict[str, int]:
    """Assert it for one workload, and return how often requests paused by policy."""
    workload = skewed(seed, rate, stride, num_requests)
    fcfs = replay(costs, workload, OPTIONS)
    num_pauses = {}
    for batching in (Batching.GROUPED, Batching.AUTO):
        found = replay(costs, workload, replace(OPTIONS, batching=batching))
        num_pauses[batching.value] = found.num_pauses
        for one, other in zip(found.requests, fcfs.requests, strict=True):
            assert one.ttft_s is not None
            assert other.ttft_s is not None
            assert one.ttft_s - other.ttft_s <= BOUND.allowed_s(other.ttft_s), (batching, one.request)
    return num_pauses


def test_first_tokens_come_within_the_bound() -> None:
    num_pauses = check_bound(dlora_costs(), DLORA_RPS, 32, seed=1, num_requests=150)
    assert num_pauses["auto"] > 0, "nothing was paused, so nothing is shown"


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "stride"), CASES)
def test_first_tokens_come_within_the_bound_with_costs_of_dlora(seed: int, stride: int) -> None:
    check_bound(dlora_costs(), DLORA_RPS, stride, seed, num_requests=300)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "stride"), CASES)
def test_first_tokens_come_within_the_bound_with_our_costs(seed: int, stride: int) -> None:
    check_bound(our_costs(), OUR_RPS, stride, seed, num_requests=300)
