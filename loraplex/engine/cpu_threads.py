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
    """The number of threads that torch takes by itself, but no more than a container's CPU quota pays for in
    full: one more would be stopped in every period, and all others wait for it."""
    found, quota = torch.get_num_threads(), cpu_quota()
    return found if quota is None else max(min(found, math.floor(quota)), 1)


class Reading(NamedTuple):
    """Meters of this process, all of them counting up."""

    wall_s: float
    cpu_s: float
    num_preemptions: int


def read_meters() -> Reading:
    """Preemptions are of all threads: how often the system took a core from one that could have gone on."""
    preemptions = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0
    return Reading(time.perf_counter(), time.process_time(), preemptions)


class StepThreads:
    """Sets torch's number of threads, which compiled kernels use too, and measures steps for the governor.

    Used by the thread that runs the steps: torch keeps the number for each thread.
    """

    def __init__(
        self, governor: ThreadGovernor, work: StepWork, read: Callable[[], Reading] = read_meters
    ) -> None:
        """`work`: what attending to a context costs beside computing a token."""
        self._governor = governor
        self._work = work
        self._read = read
        self._warned = False

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Run the step that was planned in this block."""
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
        """Give torch all threads back, for what else this process does."""
        self._set(self._governor.max_threads)

    def _set(self, num_threads: int) -> None:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)

    def _report(self, change: ThreadChange) -> None:
        """Warn of the first change, which is always to fewer threads; later ones are for debugging."""
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
