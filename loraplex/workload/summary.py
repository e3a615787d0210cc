"""Summarizes a workload in one pass, without storing it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from loraplex.workload.request import WorkloadHeader, WorkloadRequest

_MAX_BINS: Final = 4096


class TimeBins:
    """Requests by time. Bins are a second wide; their width doubles whenever there would be too many."""

    def __init__(self) -> None:
        self.width_s = 1.0
        self.counts: list[int] = []

    def add(self, time_s: float) -> None:
        while (place := int(time_s // self.width_s)) >= _MAX_BINS:
            padded = [*self.counts, 0]
            self.counts = [sum(padded[place : place + 2]) for place in range(0, len(self.counts), 2)]
            self.width_s *= 2
        self.counts.extend([0] * (place + 1 - len(self.counts)))
        self.counts[place] += 1


@dataclass(kw_only=True, slots=True)
class WorkloadCounts:
    """Counts for summaries and plots. Gaps are those between consecutive arrivals."""

    header: WorkloadHeader | None
    prompts: Counter[int] = field(default_factory=Counter)
    outputs: Counter[int] = field(default_factory=Counter)
    adapters: Counter[int] = field(default_factory=Counter)
    times: TimeBins = field(default_factory=TimeBins)
    num_requests: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    sum_of_squared_gaps: float = 0.0

    def add(self, request: WorkloadRequest) -> None:
        if self.num_requests == 0:
            self.first_s = request.arrival_s
        else:
            self.sum_of_squared_gaps += (request.arrival_s - self.last_s) ** 2
        self.last_s = request.arrival_s
        self.num_requests += 1
        self.prompts[request.prompt_tokens] += 1
        self.outputs[request.output_tokens] += 1
        self.adapters[request.adapter] += 1
        self.times.add(request.arrival_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSummary:
    """Statistics of lengths in tokens; percentiles are lengths that occur."""

    mean: float
    p50: int
    p90: int
    p95: int
    p99: int
    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSummary:
    """Statistics of a workload; shares are of requests.

    `gap_cv`: 1 for Poisson, more is bursty; None if there are too few requests. `num_adapters`: None if the
    file does not say.
    """

    num_requests: int
    duration_s: float
    rate_per_s: float | None
    gap_cv: float | None
    busiest_per_s: float
    busiest_width_s: float
    prompt: LengthSummary
    output: LengthSummary
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    num_adapters: int | None
    num_adapters_used: int
    busiest_adapter_share: float
    busiest_tenth_share: float
    num_adapters_for_half: int
    rank_shares: Mapping[int, float] | None


def summarize(counts: WorkloadCounts) -> WorkloadSummary:
    """Return the summary. The busiest tenth is of all adapters if their number is known, else of those
    used."""
    header, number = counts.header, counts.num_requests
    assert number > 0, "a workload without requests is refused when it is read"
    duration_s = counts.last_s
    if header is not None and header.duration_s is not None:
        duration_s = header.duration_s
    by_use = sorted(counts.adapters.values(), reverse=True)
    num_adapters = None if header is None else header.num_adapters
    prompt, output = _lengths(counts.prompts), _lengths(counts.outputs)
    rate = number / duration_s if duration_s > 0 else None
    return WorkloadSummary(
        num_requests=number,
        duration_s=duration_s,
        rate_per_s=rate,
        gap_cv=_gap_cv(counts),
        busiest_per_s=max(counts.times.counts) / counts.times.width_s,
        busiest_width_s=counts.times.width_s,
        prompt=prompt,
        output=output,
        prompt_tokens_per_s=None if rate is None else rate * prompt.mean,
        output_tokens_per_s=None if rate is None else rate * output.mean,
        num_adapters=num_adapters,
        num_adapters_used=len(by_use),
        busiest_adapter_share=by_use[0] / number,
        busiest_tenth_share=sum(by_use[: math.ceil((num_adapters or len(by_use)) / 10)]) / number,
        num_adapters_for_half=_needed_for_half(by_use),
        rank_shares=None if header is None else _rank_shares(counts.adapters, header.ranks),
    )


def _gap_cv(counts: WorkloadCounts) -> float | None:
    num_gaps = counts.num_requests - 1
    mean_s = (counts.last_s - counts.first_s) / max(num_gaps, 1)
    if num_gaps < 2 or mean_s <= 0:
        return None
    return math.sqrt(max(counts.sum_of_squared_gaps / num_gaps - mean_s**2, 0.0)) / mean_s


def _lengths(seen: Counter[int]) -> LengthSummary:
    total = seen.total()
    wanted = {share: math.ceil(share * total) for share in (0.5, 0.9, 0.95, 0.99)}
    found: dict[float, int] = {}
    passed = 0
    for length in sorted(seen):
        passed += seen[length]
        for share, place in wanted.items():
            if passed >= place:
                found.setdefault(share, length)
    return LengthSummary(
        mean=sum(length * count for length, count in seen.items()) / total,
        p50=found[0.5],
        p90=found[0.9],
        p95=found[0.95],
        p99=found[0.99],
        most=max(seen),
    )


def _needed_for_half(by_use: Sequence[int]) -> int:
    half, passed = sum(by_use) / 2, 0
    for number, count in enumerate(by_use, start=1):
        passed += count
        if passed >= half:
            return number
    raise AssertionError("all of them are more than half")


def _rank_shares(adapters: Counter[int], ranks: Sequence[int]) -> dict[int, float]:
    by_rank = dict.fromkeys(sorted(set(ranks)), 0)
    for adapter, count in adapters.items():
        by_rank[ranks[adapter]] += count
    return {rank: count / adapters.total() for rank, count in by_rank.items()}
