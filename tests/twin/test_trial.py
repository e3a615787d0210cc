"""Workloads at other rates, for trials that last long enough."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from loraplex.twin.slo import Slo
from loraplex.twin.trial import least_trial_requests, least_trial_s, trial, trial_s
from loraplex.workload.jsonl import WorkloadRequest

WORKLOAD = [
    WorkloadRequest(arrival_s=5.0 + number, prompt_tokens=10 + number, output_tokens=20, adapter=number % 3)
    for number in range(60)
]


def test_a_trial_has_time_for_several_requests_that_take_all_they_may() -> None:
    assert least_trial_s(WORKLOAD, Slo(ttft_s=10.0)) == 60.0
    assert least_trial_s(WORKLOAD, Slo(tpt_s=0.5)) == 60.0
    assert least_trial_s(WORKLOAD, Slo()) == 0.0


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0, 100.0])
def test_a_workload_that_is_over_too_soon_is_repeated_at_the_same_rate(factor: float) -> None:
    requests = trial(WORKLOAD, factor, least_s=50.0)
    assert trial_s(requests) >= 50.0 * 0.98
    gaps_s = {round(after.arrival_s - before.arrival_s, 6) for before, after in pairwise(requests)}
    assert gaps_s == {round(1.0 / factor, 6)}
    times, rest = divmod(len(requests), len(WORKLOAD))
    assert rest == 0
    assert Counter(each.prompt_tokens for each in requests) == {10 + number: times for number in range(60)}


@pytest.mark.parametrize(
    ("attainment", "number"),
    [(0.5, 20), (0.9, 100), (0.99, 1000), (0.999, 10_000), (0.9999, 100_000), (1, 1)],
)
def test_so_many_requests_that_ten_may_miss_tell_the_attainment(attainment: float, number: int) -> None:
    assert least_trial_requests(attainment) == number


def test_a_workload_with_too_few_requests_is_repeated() -> None:
    assert len(trial(WORKLOAD, 1.0, least_s=1.0, least_requests=1000)) == 1020
    assert len(trial(WORKLOAD, 1.0, least_s=1.0, least_requests=60)) == 60
    assert len(trial(WORKLOAD, 1.0, least_s=1.0, least_requests=10**6)) == 19_980, "up to 20,000"


def test_a_repetition_is_no_copy() -> None:
    first, second = (each[:60] for each in (trial(WORKLOAD, 100.0, 1.0), trial(WORKLOAD, 100.0, 1.0)[60:]))
    assert [each.prompt_tokens for each in first] != [each.prompt_tokens for each in second]


def test_a_trial_does_not_become_endless() -> None:
    requests = trial(WORKLOAD, 1e6, least_s=60.0)
    assert len(requests) <= 20_000
    assert trial_s(requests) < 60.0
