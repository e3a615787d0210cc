"""Figures of a workload, against those of all its requests at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.workload import WorkloadHeader, WorkloadRequest
from loraplex.workload.summary import TimeBins, WorkloadCounts, summarize

REQUESTS = st.lists(
    st.builds(
        WorkloadRequest,
        arrival_s=st.floats(0, 5_000),
        prompt_tokens=st.integers(1, 50),
        output_tokens=st.integers(1, 9_000),
        adapter=st.integers(0, 3),
    ),
    min_size=1,
    max_size=60,
).map(lambda requests: sorted(requests, key=lambda request: request.arrival_s))


def counted(requests: list[WorkloadRequest], header: WorkloadHeader | None = None) -> WorkloadCounts:
    counts = WorkloadCounts(header=header)
    for request in requests:
        counts.add(request)
    return counts


@given(REQUESTS)
def test_figures_are_those_of_all_requests_at_once(requests: list[WorkloadRequest]) -> None:
    header = WorkloadHeader(ranks=(8, 8, 64, 16), duration_s=5_000.0)
    summary = summarize(counted(requests, header))
    outputs = sorted(request.output_tokens for request in requests)
    assert summary.num_requests == len(requests)
    assert summary.rate_per_s == len(requests) / 5_000
    assert summary.output.mean == pytest.approx(np.mean(outputs))
    for share, value in ((0.5, summary.output.p50), (0.9, summary.output.p90), (0.99, summary.output.p99)):
        assert value == outputs[math.ceil(share * len(outputs)) - 1]
    assert summary.output.most == outputs[-1]
    gaps_s = np.diff([request.arrival_s for request in requests])
    if gaps_s.size >= 2 and gaps_s.mean() > 1e-3:
        assert summary.gap_cv == pytest.approx(gaps_s.std() / gaps_s.mean(), rel=1e-6, abs=1e-6)
    counts = sorted(np.bincount([request.adapter for request in requests]).tolist())[::-1]
    assert summary.busiest_adapter_share == summary.busiest_tenth_share == counts[0] / len(requests)
    assert sum(counts[: summary.num_adapters_for_half]) * 2 >= len(requests)
    assert sum(counts[: summary.num_adapters_for_half - 1]) * 2 < len(requests)
    assert summary.rank_shares is not None
    assert list(summary.rank_shares) == [8, 16, 64]
    assert sum(summary.rank_shares.values()) == pytest.approx(1)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50))
def test_bins_of_time_lose_nothing_and_stay_few(times_s: list[float]) -> None:
    bins = TimeBins()
    for time_s in times_s:
        bins.add(time_s)
    assert len(bins.counts) <= 4096
    assert bins.width_s == 1 or max(times_s) >= 4096 * bins.width_s / 2
    expected = [0] * len(bins.counts)
    for time_s in times_s:
        expected[int(time_s // bins.width_s)] += 1
    assert bins.counts == expected


def test_what_cannot_be_told_is_none() -> None:
    one = WorkloadRequest(arrival_s=0.0, prompt_tokens=3, output_tokens=2, adapter=7)
    summary = summarize(counted([one]))
    assert summary.rate_per_s is summary.gap_cv is summary.num_adapters is summary.rank_shares is None
    assert summary.prompt.p99 == 3
    assert summarize(counted([one] * 5)).gap_cv is None
