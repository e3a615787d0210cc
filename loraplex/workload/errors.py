"""Errors in workloads, worded for their authors."""

from __future__ import annotations

from loraplex.core.errors import UserError


class WorkloadError(UserError):
    """A workload, trace or recipe that cannot be used as it is; names file and line, or the field."""
