"""The most that a planned GPU serves: its throughput when it is flooded with what it is planned for."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.planner.demand import Demand
from loraplex.planner.plan import GpuPlan

_TIMES_BASE: Final = 1.5
"""Tokens of a flood, as a multiple of the most that the GPU serves of the base model."""
_OUR_FLOOD_S: Final = 60.0
_SLOTS_FLOOD_S: Final = 300.0
"""Engines with slots first read adapters from disk, which must not count for much."""


def flood(gpu: GpuPlan, demand: Demand, base_tok_s: float) -> GpuPlan:
    """Return the same GPU with more requests than it serves, in the same proportions. `base_tok_s`: the most
    that it serves without adapters. An idle GPU is flooded with equal rates."""
    offered_tok_s = demand.offered_tok_s(gpu.adapters)
    if offered_tok_s > 0:
        times = max(_TIMES_BASE * base_tok_s / offered_tok_s, 1.0)
        flooded = [replace(each, rate_rps=each.rate_rps * times) for each in gpu.adapters]
    else:
        equal_rps = _TIMES_BASE * base_tok_s / demand.request_tokens / len(gpu.adapters)
        flooded = [replace(each, rate_rps=equal_rps) for each in gpu.adapters]
    return replace(gpu, adapters=tuple(flooded))


def flood_s(profile: Profile) -> float:
    """Return the seconds to simulate a flood."""
    return _OUR_FLOOD_S if isinstance(profile, CostModel) else _SLOTS_FLOOD_S
