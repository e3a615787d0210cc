"""Workloads: which request arrives when, how long it is, and whose adapter it asks for."""

from loraplex.workload.jsonl import WorkloadError, WorkloadRequest, read_workload, write_workload

__all__ = ["WorkloadError", "WorkloadRequest", "read_workload", "write_workload"]
