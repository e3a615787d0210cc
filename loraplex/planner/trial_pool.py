"""Runs many simulations of planned GPUs: on all cores if they take long, else in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from typing import Final, NamedTuple

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.planner.demand import Demand
from loraplex.planner.plan import GpuPlan
from loraplex.planner.trial import GpuFigures, run_gpu
from loraplex.twin.worker_pool import worker_pool

_POOLED_REQUESTS: Final = {"ours": 20_000, "slots": 200_000}
"""Requests above which starting processes takes less time than they save: some 5 s of simulation."""


class Trial(NamedTuple):
    """One simulation of a GPU."""

    gpu: GpuPlan
    duration_s: float
    seed: int

    @property
    def num_requests(self) -> float:
        return self.gpu.rate_rps * self.duration_s


def run_trials(
    profile: Profile,
    demand: Demand,
    trials: Sequence[Trial],
    report: Callable[[float], None] = lambda share: None,
) -> list[GpuFigures]:
    """Return the figures of each trial, in their order. `report`: gets the share that is done."""
    found: dict[int, GpuFigures] = {}
    for number, figures in _as_completed(profile, demand, trials):
        found[number] = figures
        report(len(found) / len(trials))
    return [found[number] for number in range(len(trials))]


def _as_completed(
    profile: Profile, demand: Demand, trials: Sequence[Trial]
) -> Iterator[tuple[int, GpuFigures]]:
    most = _POOLED_REQUESTS["ours" if isinstance(profile, CostModel) else "slots"]
    if sum(each.num_requests for each in trials) <= most:
        for number, each in enumerate(trials):
            yield number, _run(profile, demand, each)
        return
    with worker_pool(len(trials)) as pool:
        futures = {pool.submit(_run, profile, demand, each): number for number, each in enumerate(trials)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _run(profile: Profile, demand: Demand, trial: Trial) -> GpuFigures:
    return run_gpu(profile, demand, trial.gpu, duration_s=trial.duration_s, seed=trial.seed)
