"""A workload at another rate, repeated until a trial at that rate is long enough and has enough requests to
measure the share of them that attain the SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from loraplex.twin.fleet_run import at_rate, shuffled
from loraplex.twin.slo import Slo
from loraplex.workload.jsonl import WorkloadRequest

_REQUEST_TIMES: Final = 6.0
"""Length of a trial, in mean requests that take all the time the SLO allows, one after another. In a shorter
trial a queue that grows without limit need not have reached the SLO's limit yet."""
_MISSES: Final = 10.0
"""Number of requests of a trial that may miss the SLO. If less than one may, a single request decides, and
the result is the rate of the slowest few."""
_MOST_REQUESTS: Final = 20_000
"""Trials are not repeated beyond this: far above its capacity, a fleet takes long to simulate."""


def least_trial_s(workload: Sequence[WorkloadRequest], slo: Slo) -> float:
    """Return how long a trial has to last, given the time that the SLO allows the mean request."""
    mean_tokens = sum(each.output_tokens for each in workload) / len(workload)
    return _REQUEST_TIMES * ((slo.ttft_s or 0.0) + mean_tokens * (slo.token_s or 0.0))


def least_trial_requests(attainment: float) -> int:
    """Return how many requests a trial must have, given the share that must attain the SLO. One is enough if
    all must: then none of the workload's requests may miss it."""
    return 1 if attainment >= 1 else math.ceil(round(_MISSES / (1 - attainment), 6))


def trial(
    workload: Sequence[WorkloadRequest], factor: float, least_s: float, least_requests: int = 1
) -> list[WorkloadRequest]:
    """Return the workload `factor` times as fast, repeated to last for `least_s` and to have
    `least_requests`, if that takes at most 20,000 requests. In a repetition, requests that arrive within ten
    seconds change places."""
    once = at_rate(workload, factor)
    span_s = trial_s(once) * len(once) / max(len(once) - 1, 1)
    most = max(_MOST_REQUESTS // len(once), 1)
    wanted = max(math.ceil(least_s / span_s), math.ceil(least_requests / len(once)))
    number = max(min(wanted, most), 1)
    return [
        replace(each, arrival_s=each.arrival_s + turn * span_s)
        for turn in range(number)
        for each in shuffled(once, turn)
    ]


def trial_s(requests: Sequence[WorkloadRequest]) -> float:
    """Return the seconds from the first arrival to the last."""
    return requests[-1].arrival_s - requests[0].arrival_s
