"""Runs the steps of a CPU engine on as many threads as its governor decides."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from loraplex.engine.machine import cpu_quota
from loraplex.perf.thread_governor import StepUsage, ThreadChange, ThreadGovernor
from loraplex.scheduling.plan import StepPlan
from loraplex.scheduling.work import StepWork

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)


def default_threads() -> int:
    """Return torch's default number of threads, limited to a container's CPU quota, rounded down: one more
    thread would be throttled in every period, and all others would wait for it."""
    found, quota = torch.get_num_threads(), cpu_quota()
    return found if quota is None else max(min(found, math.floor(quota)), 1)


class Reading(NamedTuple):
    """Counters of this process, which only increase."""

    wall_s: float
    cpu_s: float
    num_preemptions: int


def read_meters() -> Reading:
    """Read the counters. Preemptions are those of all threads: how often the system took a core from a
    runnable one."""
    preemptions = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0
    return Reading(time.perf_counter(), time.process_time(), preemptions)


class StepThreads:
    """Sets torch's number of threads, which compiled kernels use too, and measures steps for the governor.

    Used by the thread that runs the steps: torch keeps the number for each thread.
    """

    def __init__(
        self, governor: ThreadGovernor, work: StepWork, read: Callable[[], Reading] = read_meters
    ) -> None:
        """`work`: the cost of attention to a context relative to a token's other work."""
        self._governor = governor
        self._work = work
        self._read = read
        self._warned = False

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Measure the step that runs inside this context, on the number of threads the governor chose."""
        self._set(self._governor.num_threads)
        before = self._read()
        yield
        after = self._read()
        usage = StepUsage(
            num_tokens=plan.num_tokens,
            work=sum(self._work.cost(chunk.start, chunk.num_tokens) for chunk in plan.chunks),
            wall_s=after.wall_s - before.wall_s,
            cpu_s=after.cpu_s - before.cpu_s,
            num_preemptions=after.num_preemptions - before.num_preemptions,
        )
        change = self._governor.observe(usage, after.wall_s)
        if change is not None:
            self._report(change)

    def close(self) -> None:
        """Reset torch to the maximum number of threads, for other uses of this process."""
        self._set(self._governor.max_threads)

    def _set(self, num_threads: int) -> None:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)

    def _report(self, change: ThreadChange) -> None:
        """Warn about the first change, which is always to fewer threads; log later ones for debugging."""
        logger.log(
            logging.DEBUG if self._warned else logging.WARNING,
            "%susing %d of %d threads, steps take %s instead of %s%s",
            "" if self._warned else "other programs take CPU time from this process: ",
            change.new_threads,
            self._governor.max_threads,
            _milliseconds(change.new_step_s),
            _milliseconds(change.old_step_s),
            "" if self._warned else "; set --threads to choose",
        )
        self._warned = True


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
