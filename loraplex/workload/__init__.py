"""Workloads: requests with arrival times, lengths and adapters."""

from loraplex.workload.errors import WorkloadError
from loraplex.workload.jsonl import WorkloadFile, read_workload, save_workload, write_workload
from loraplex.workload.request import Workload, WorkloadHeader, WorkloadRequest

__all__ = [
    "Workload",
    "WorkloadError",
    "WorkloadFile",
    "WorkloadHeader",
    "WorkloadRequest",
    "read_workload",
    "save_workload",
    "write_workload",
]
