"""Checks a plan in the twin, on traffic that it was not made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.planner.demand import PlanError
from loraplex.planner.error_bars import Bar, bar_of, profile_error
from loraplex.planner.most_served import flood, flood_s
from loraplex.planner.objectives import NO_LIMITS, Objective
from loraplex.planner.plan import GpuPlan, Plan
from loraplex.planner.plan_file import demand_of
from loraplex.planner.ranks import check_ranks
from loraplex.planner.trial import GpuFigures, check_lengths, judged_s, most_of_base_model
from loraplex.planner.trial_pool import Trial, run_trials

SEEDS: Final = (1, 2, 3, 4, 5)
"""Packers judge by seed 0."""
CHECKED_S: Final = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCheck:
    """One GPU's figures by seed, and what it has to attain. `most_tok_s`: tokens per second of prompts and
    answers that it serves at most of these adapters, in these proportions; None if nobody asked."""

    gpu: GpuPlan
    runs: tuple[GpuFigures, ...]
    objective: Objective = NO_LIMITS
    most_tok_s: float | None = None

    @property
    def fits(self) -> bool:
        """Return whether its adapters fit its memory."""
        return all(run.fits for run in self.runs)

    @property
    def num_starved(self) -> int:
        """Number of seeds with which it starves."""
        return sum(run.is_starved for run in self.runs)

    @property
    def missed(self) -> tuple[str, ...]:
        """The limits of the objective that its means over all seeds miss, in words."""
        return self.objective.missed(self.mean("ttft_s"), self.mean("itl_s"))

    @property
    def share_served(self) -> float:
        """Share of the offered tokens that it serves, with the worst seed."""
        return min(
            (run.served_tok_s / run.offered_tok_s for run in self.runs if run.offered_tok_s), default=1.0
        )

    @property
    def utilisation(self) -> float | None:
        """Tokens that it is offered over the most that it serves."""
        offered_tok_s = self.mean("offered_tok_s")
        return offered_tok_s / self.most_tok_s if self.most_tok_s and offered_tok_s is not None else None

    def mean(self, figure: str) -> float | None:
        """Return the mean of a figure over the seeds that have it."""
        values = self._values(figure)
        return fmean(values) if values else None

    def bar(self, figure: str, profile: Profile) -> Bar | None:
        """Return the mean of a figure with its error bar; None if no seed has it."""
        values = self._values(figure)
        return bar_of(values, profile_error(profile, figure)) if values else None

    def _values(self, figure: str) -> list[float]:
        return [value for run in self.runs if (value := getattr(run, figure)) is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCheck:
    """The check of a plan. `duration_s`: None if each GPU was simulated as long as packers do."""

    gpus: tuple[GpuCheck, ...]
    seeds: tuple[int, ...]
    duration_s: float | None

    @property
    def starves(self) -> bool:
        """Return whether any GPU starves with any seed."""
        return any(gpu.num_starved for gpu in self.gpus)

    @property
    def holds(self) -> bool:
        """Return whether no GPU starves with any seed, and every GPU attains the objective."""
        return not self.starves and not any(gpu.missed for gpu in self.gpus)

    @property
    def share_served(self) -> float:
        """Share of all offered tokens that is served, as a mean over seeds."""
        offered = sum(gpu.mean("offered_tok_s") or 0.0 for gpu in self.gpus)
        return sum(gpu.mean("served_tok_s") or 0.0 for gpu in self.gpus) / offered if offered else 1.0

    def mean(self, figure: str) -> float | None:
        """Return the mean of a figure over GPUs, each of which counts with its requests."""
        known = [(each, gpu.gpu.rate_rps) for gpu in self.gpus if (each := gpu.mean(figure)) is not None]
        weight = sum(rate_rps for _, rate_rps in known)
        return sum(value * rate_rps for value, rate_rps in known) / weight if weight else None


def check_plan(
    plan: Plan,
    profile: Profile,
    *,
    seeds: Sequence[int] = SEEDS,
    duration_s: float | None = CHECKED_S,
    with_most: bool = False,
    report: Callable[[float], None] = lambda share: None,
) -> PlanCheck:
    """Simulate every GPU with every seed. `duration_s`: None for as long as packers do; `with_most`: also
    simulate the most that each GPU serves; `report`: gets the share that is done."""
    demand = demand_of(plan)
    check_kind(plan, profile)
    check_ranks(profile, demand.adapters)
    check_lengths(profile, demand)
    loaded = [number for number, gpu in enumerate(plan.gpus) if gpu.adapters]
    seconds = [
        judged_s(gpu.rate_rps, profile, len(gpu.adapters)) if duration_s is None else duration_s
        for gpu in plan.gpus
    ]
    trials = [Trial(plan.gpus[number], seconds[number], seed) for number in loaded for seed in seeds]
    if with_most:
        base_tok_s = most_of_base_model(profile, demand)
        trials += [Trial(flood(plan.gpus[each], demand, base_tok_s), flood_s(profile), 0) for each in loaded]
    figures = run_trials(profile, demand, trials, report)
    runs: dict[int, tuple[GpuFigures, ...]] = {}
    most_tok_s: dict[int, float] = {}
    for place, number in enumerate(loaded):
        runs[number] = tuple(figures[place * len(seeds) : (place + 1) * len(seeds)])
        if with_most:
            flooded = figures[len(loaded) * len(seeds) + place]
            most_tok_s[number] = max(each.served_tok_s for each in (flooded, *runs[number]))
    return PlanCheck(
        gpus=tuple(
            GpuCheck(
                gpu=gpu,
                runs=runs.get(number, ()),
                objective=plan.objective,
                most_tok_s=most_tok_s.get(number),
            )
            for number, gpu in enumerate(plan.gpus)
        ),
        seeds=tuple(seeds),
        duration_s=duration_s,
    )


def check_kind(plan: Plan, profile: Profile) -> None:
    """Raise PlanError if the plan is for another kind of engine than the profile."""
    has_slots = not isinstance(profile, CostModel)
    for number, gpu in enumerate(plan.gpus):
        if gpu.adapters and (gpu.num_slots is not None) != has_slots:
            raise PlanError(
                f"GPU {number} of the plan has {'no slots' if has_slots else 'slots'}, and the profile is of "
                f"an engine {'with' if has_slots else 'without'} slots; give the one that the plan was "
                f"made with ({plan.profile}), or make a plan with this"
            )
