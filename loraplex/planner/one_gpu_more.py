"""The plan with one GPU more, and with one less: moved as little as it takes, not planned anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from loraplex.planner.demand import AdapterDemand
from loraplex.planner.plan import GpuPlan, Plan, whole_adapters


def with_one_more(plan: Plan) -> Plan:
    """Return the plan with a further GPU that relieves every other of the same part of its load.

    Each GPU hands over about one of N + 1 of its requests per second, in whole adapters. The further GPU has
    as many slots as the one with most."""
    kept: list[GpuPlan] = []
    moved: list[GpuPlan] = []
    for gpu in plan.gpus:
        stays, goes = _divided(gpu.adapters, 1 / (len(plan.gpus) + 1))
        kept.append(replace(gpu, adapters=stays))
        moved.append(replace(gpu, adapters=goes))
    num_slots = max((gpu.num_slots for gpu in plan.gpus if gpu.num_slots is not None), default=None)
    added = GpuPlan(adapters=whole_adapters(moved), num_slots=num_slots)
    return replace(plan, gpus=(*kept, added) if added.adapters else tuple(kept))


def with_one_less(plan: Plan) -> Plan:
    """Return the plan without the GPU with the lowest rate, as if it had failed. Each of its adapters, the
    busiest first, goes to the GPU that then has the lowest rate. The others keep their slots.

    There must be two GPUs."""
    lost = min(range(len(plan.gpus)), key=lambda each: plan.gpus[each].rate_rps)
    left = [gpu for number, gpu in enumerate(plan.gpus) if number != lost]
    least = [(gpu.rate_rps, number) for number, gpu in enumerate(left)]
    heapify(least)
    taken: list[list[AdapterDemand]] = [[] for _ in left]
    for adapter in sorted(plan.gpus[lost].adapters, key=lambda each: (-each.rate_rps, each.name)):
        rate_rps, number = least[0]
        taken[number].append(adapter)
        heapreplace(least, (rate_rps + adapter.rate_rps, number))
    return replace(
        plan,
        gpus=tuple(
            # A GPU that had a copy of an adapter takes that of the lost one too.
            replace(gpu, adapters=whole_adapters([gpu, replace(gpu, adapters=tuple(more))]))
            for gpu, more in zip(left, taken, strict=True)
        ),
    )


def _divided(
    adapters: Sequence[AdapterDemand], share: float
) -> tuple[tuple[AdapterDemand, ...], tuple[AdapterDemand, ...]]:
    """Divide adapters into those that stay, and those that go and have about this share of the rate. The
    busiest are decided on first, and those that go are spread over all rates."""
    stays: list[AdapterDemand] = []
    goes: list[AdapterDemand] = []
    total_rps = gone_rps = 0.0
    for each in sorted(adapters, key=lambda each: (-each.rate_rps, each.name)):
        total_rps += each.rate_rps
        if gone_rps + each.rate_rps / 2 < share * total_rps:
            goes.append(each)
            gone_rps += each.rate_rps
        else:
            stays.append(each)
    return tuple(stays), tuple(goes)
