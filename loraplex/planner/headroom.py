"""Room that a plan leaves on each GPU for more requests than were asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from loraplex.planner.demand import Demand
from loraplex.planner.plan import GpuPlan

DEFAULT: Final = 0.05
"""Share by which rates are taken for higher. Over half an hour, requests that arrive at random are a few
percent more or fewer than their rate, and a GPU that is full by one seed starves by another."""


def with_headroom(demand: Demand, share: float) -> Demand:
    """Return the demand with rates that are higher by this share."""
    if share == 0.0:
        return demand
    more = tuple(replace(each, rate_rps=each.rate_rps * (1.0 + share)) for each in demand.adapters)
    return replace(demand, adapters=more)


def without_headroom(gpus: Iterable[GpuPlan], demand: Demand) -> tuple[GpuPlan, ...]:
    """Return a plan of `with_headroom` with the rates of the demand. An adapter must be on one GPU."""
    asked = {each.name: each for each in demand.adapters}
    return tuple(replace(gpu, adapters=tuple(asked[each.name] for each in gpu.adapters)) for gpu in gpus)
