"""Counts of whole workloads."""

from __future__ import annotations

from loraplex.workload.request import Workload
from loraplex.workload.summary import WorkloadCounts


def count_workload(workload: Workload) -> WorkloadCounts:
    counts = WorkloadCounts(header=workload.header)
    for request in workload:
        counts.add(request)
    return counts
