"""Divides adapters evenly: every GPU gets about the same rate of each rank.

A greedy packer that stops a little before each GPU is full leaves a last one half empty. If all GPUs are
alike, what is left over is shared, and one good GPU shows that all may be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from typing import Final

from loraplex.planner.demand import AdapterDemand
from loraplex.planner.judge import Judge
from loraplex.planner.packing.testing_points import SLOT_COUNTS
from loraplex.planner.plan import GpuPlan
from loraplex.planner.queued import Queued

_RATE_OF_ADAPTER: Final = 0.1
"""The weight of each adapter beside its rate, relative to the mean rate: adapters that are hardly asked for
would all go to one GPU."""
_SERVES_ALL: Final = 0.99
"""Share of what is offered above which no other number of slots is looked for."""
_WORTH_FEWER: Final = 1.005
"""The factor of throughput that fewer slots have to bring: with more, fewer requests wait for one."""


def divided(adapters: Iterable[AdapterDemand], num_gpus: int) -> list[Queued]:
    """Return the adapters of each GPU, that with the highest rate first; there may be fewer GPUs than asked
    for, as none is empty. Each adapter, the largest ranks and of these the highest rates first, goes to the
    GPU with the least so far."""
    ordered = sorted(adapters, key=lambda each: (-each.rank, -each.rate_rps, each.name))
    num_parts = min(num_gpus, len(ordered))
    if not num_parts:
        return []
    of_adapter = _RATE_OF_ADAPTER * sum(each.rate_rps for each in ordered) / len(ordered) or 1.0
    parts: list[list[AdapterDemand]] = [[] for _ in range(num_parts)]
    least = [(0.0, number) for number in range(num_parts)]
    heapify(least)
    for each in ordered:
        load, number = least[0]
        parts[number].append(each)
        heapreplace(least, (load + each.rate_rps + of_adapter, number))
    return sorted(map(Queued, parts), key=lambda part: -sum(part.columns.rates_rps))


def evenly(
    parts: Sequence[Queued], judge: Judge, request_tokens: float, *, has_slots: bool
) -> tuple[GpuPlan, ...] | None:
    """Return a plan of GPUs with these adapters and equal slots, those that serve the first GPU best; None if
    one starves."""
    num_slots = _best_slots(parts[0], judge, request_tokens) if has_slots else None
    if has_slots and num_slots is None:
        return None
    if any(judge.judge(part, num_slots).is_starved for part in parts):
        return None
    return tuple(GpuPlan(adapters=tuple(part), num_slots=num_slots) for part in parts)


def _best_slots(part: Queued, judge: Judge, request_tokens: float) -> int | None:
    """Return the number of slots with the highest throughput, the most among equals; None if none fits."""
    max_rank = part.max_rank
    enough = bisect_left(SLOT_COUNTS, len(part)) + 1
    offered_tok_s = sum(part.columns.rates_rps) * request_tokens
    best, best_tok_s = None, 0.0
    for num_slots in reversed(SLOT_COUNTS[:enough]):
        if not judge.fits(max_rank, num_slots):
            continue
        found = judge.judge(part, num_slots).throughput_tok_s
        if best is not None and found <= _WORTH_FEWER * best_tok_s:
            break  # Fewer slots leave more memory for requests, until these wait for a slot.
        best, best_tok_s = num_slots, found
        if best_tok_s >= _SERVES_ALL * offered_tok_s:
            break
    return best
