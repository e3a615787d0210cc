"""Checks a plan in the twin, on traffic that it was not made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Final

from loraplex.perf.named_profiles import Profile
from loraplex.planner.plan import GpuPlan, Plan
from loraplex.planner.plan_file import demand_of
from loraplex.planner.trial import GpuFigures, check_lengths, run_gpu
from loraplex.twin.worker_pool import worker_pool

SEEDS: Final = (1, 2, 3, 4, 5)
"""Packers judge by seed 0."""
CHECKED_S: Final = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCheck:
    """One GPU's figures by seed."""

    gpu: GpuPlan
    runs: tuple[GpuFigures, ...]

    @property
    def fits(self) -> bool:
        """Return whether its adapters fit its memory."""
        return all(run.fits for run in self.runs)

    @property
    def num_starved(self) -> int:
        """Number of seeds with which it starves."""
        return sum(run.is_starved for run in self.runs)

    @property
    def share_served(self) -> float:
        """Share of the offered tokens that it serves, with the worst seed."""
        return min(
            (run.served_tok_s / run.offered_tok_s for run in self.runs if run.offered_tok_s), default=1.0
        )

    def mean(self, figure: str) -> float | None:
        """Return the mean of a figure over the seeds that have it."""
        values = [value for run in self.runs if (value := getattr(run, figure)) is not None]
        return fmean(values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCheck:
    """The check of a plan."""

    gpus: tuple[GpuCheck, ...]
    seeds: tuple[int, ...]
    duration_s: float

    @property
    def starves(self) -> bool:
        """Return whether any GPU starves with any seed."""
        return any(gpu.num_starved for gpu in self.gpus)


def check_plan(
    plan: Plan,
    profile: Profile,
    *,
    seeds: Sequence[int] = SEEDS,
    duration_s: float = CHECKED_S,
    report: Callable[[float], None] = lambda share: None,
) -> PlanCheck:
    """Simulate every GPU with every seed, on all cores. `report`: gets the share that is done."""
    demand = demand_of(plan)
    check_lengths(profile, demand)
    tasks = [(number, seed) for number, gpu in enumerate(plan.gpus) if gpu.adapters for seed in seeds]
    found: dict[tuple[int, int], GpuFigures] = {}
    with worker_pool(len(tasks)) as pool:
        run = partial(run_gpu, profile, demand, duration_s=duration_s)
        futures = {pool.submit(run, plan.gpus[number], seed=seed): (number, seed) for number, seed in tasks}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            report(len(found) / len(tasks))
    return PlanCheck(
        gpus=tuple(
            GpuCheck(gpu=gpu, runs=tuple(found[number, seed] for seed in seeds if (number, seed) in found))
            for number, gpu in enumerate(plan.gpus)
        ),
        seeds=tuple(seeds),
        duration_s=duration_s,
    )
