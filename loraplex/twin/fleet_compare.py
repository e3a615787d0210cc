"""Compares policies: runs the same workloads under each of them, on all cores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from loraplex.core.errors import UserError
from loraplex.core.progress import Report
from loraplex.fleet.policy import PLACEMENTS, Policy
from loraplex.perf.named_profiles import Profile
from loraplex.twin.fleet_figures import PolicyFigures, figures_of
from loraplex.twin.fleet_run import FleetOptions, FleetRuns
from loraplex.twin.highest_rate import highest_rate
from loraplex.twin.operating_points import operating_points
from loraplex.twin.slo import Slo
from loraplex.twin.trial import least_trial_requests, least_trial_s, trial, trial_s
from loraplex.twin.worker_pool import worker_pool
from loraplex.workload.jsonl import WorkloadRequest

_NEARLY: Final = 0.9
_QUANTILES: Final = np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetInputs:
    """The fleet and the workload that policies are compared on."""

    profile: Profile
    workload: Sequence[WorkloadRequest]
    options: FleetOptions

    @property
    def rate(self) -> float:
        """Requests per second, from the first arrival to the last."""
        return len(self.workload) / (self.workload[-1].arrival_s - self.workload[0].arrival_s or 1.0)


class PolicyRun(NamedTuple):
    """One simulated run. `ttft_s`, `tpot_s`, `tpt_s`: 101 even quantiles over served requests. `overloaded`:
    replicas with the most waiting requests, if the fleet is overloaded."""

    figures: PolicyFigures
    ttft_s: list[float]
    tpot_s: list[float]
    tpt_s: list[float]
    overloaded: list[tuple[int, float]]


class Capacity(NamedTuple):
    """The rates that a policy sustains. `rps`: the highest rate at which the SLO holds; infinite if it holds
    at every rate tried, None if at none. `tried`: rates and the attainment there, ascending. `trial_s`,
    `trial_requests`: duration and number of requests of the trial at `rps`, or else at the highest rate
    tried. A trial should last for `least_s` and have `least_requests`; it `is_short` or `has_few` where that
    would take too many requests."""

    rps: float | None
    tried: list[tuple[float, float]]
    trial_s: float
    least_s: float
    trial_requests: int
    least_requests: int

    @property
    def is_short(self) -> bool:
        return self.rps is not None and self.trial_s < _NEARLY * self.least_s

    @property
    def has_few(self) -> bool:
        return self.rps is not None and self.trial_requests < self.least_requests

    @property
    def best_attainment(self) -> float:
        return max(share for _, share in self.tried)


def with_points(inputs: FleetInputs, policies: Iterable[Policy], progress: Report) -> FleetInputs:
    """Return the inputs with operating points, if a policy's placement needs them."""
    named = [PLACEMENTS[policy.placement] for policy in policies]
    if not any(each is not None and each.needs_points for each in named):
        return inputs
    points = operating_points(
        inputs.profile,
        inputs.workload,
        inputs.options.replay,
        report=lambda rank: progress(f"what a replica sustains of rank {rank}", None),
    )
    return replace(inputs, options=replace(inputs.options, points=points))


def compare_policies(
    inputs: FleetInputs, policies: Sequence[Policy], num_seeds: int, progress: Report
) -> dict[str, list[PolicyRun]]:
    """Return a run of each policy for each seed, by the policy's name."""
    inputs = with_points(inputs, policies, progress)
    found: dict[str, dict[int, PolicyRun]] = {policy.name: {} for policy in policies}
    with worker_pool(len(policies) * num_seeds, _take_inputs, (inputs,)) as pool:
        tasks = {
            pool.submit(_run, policy, seed): (policy, seed)
            for seed in range(num_seeds)
            for policy in policies
        }
        for number, task in enumerate(as_completed(tasks), start=1):
            policy, seed = tasks[task]
            found[policy.name][seed] = task.result()
            progress(f"{policy.name}, seed {seed}", number / len(tasks))
    return {name: [runs[seed] for seed in sorted(runs)] for name, runs in found.items()}


def capacities(
    inputs: FleetInputs, policies: Sequence[Policy], attainment: float, progress: Report
) -> dict[str, Capacity]:
    """Return the highest rate of each policy at which the share `attainment` of requests attains the SLO.
    Raises UserError if there is no such rate for any of them."""
    inputs = with_points(inputs, policies, progress)
    found: dict[str, Capacity] = {}
    with worker_pool(len(policies), _take_inputs, (inputs,)) as pool:
        tasks = {pool.submit(_capacity, policy, attainment): policy for policy in policies}
        for number, task in enumerate(as_completed(tasks), start=1):
            found[tasks[task].name] = task.result()
            progress(tasks[task].name, number / len(tasks))
    if all(each.rps is None for each in found.values()):
        raise _no_rate_holds(found, inputs.options.slo, attainment)
    return {policy.name: found[policy.name] for policy in policies}


def _no_rate_holds(found: Mapping[str, Capacity], slo: Slo, attainment: float) -> UserError:
    best = max(each.best_attainment for each in found.values())
    limits = (("--slo-tpt", slo.tpt_s), ("--slo-tpot", slo.tpot_s), ("--slo-ttft", slo.ttft_s))
    given = [option for option, limit_s in limits if limit_s is not None]
    return UserError(
        f"{', '.join(found)}: at no rate, however low, are {attainment:.1%} of requests {slo.in_words()}; "
        f"the most was {best:.1%}; relax {' or '.join([*given, '--attainment'])}"
    )


# ---- in the workers

_inputs: FleetInputs | None = None


def _take_inputs(inputs: FleetInputs) -> None:
    global _inputs
    _inputs = inputs


def _run(policy: Policy, seed: int) -> PolicyRun:
    assert _inputs is not None
    runs = FleetRuns(_inputs.profile, _inputs.workload, _inputs.options)
    return policy_run(runs, policy, seed, _inputs.options.slo)


def policy_run(runs: FleetRuns, policy: Policy, seed: int, slo: Slo) -> PolicyRun:
    outcome = runs.run(policy, seed)
    served = [each for each in outcome.all.requests if each.is_served]
    return PolicyRun(
        figures=figures_of(outcome, slo),
        ttft_s=_quantiles(each.ttft_s for each in served),
        tpot_s=_quantiles(each.tpot_s for each in served),
        tpt_s=_quantiles(each.tpt_s for each in served),
        overloaded=outcome.overloaded_replicas(),
    )


def _quantiles(values: Iterable[float | None]) -> list[float]:
    known = [value for value in values if value is not None]
    return np.quantile(known, _QUANTILES).tolist() if known else []


def _capacity(policy: Policy, attainment: float) -> Capacity:
    inputs = _inputs
    assert inputs is not None
    rate, slo = inputs.rate, inputs.options.slo
    least_s, least_requests = least_trial_s(inputs.workload, slo), least_trial_requests(attainment)
    tried: dict[float, float] = {}
    sizes: dict[float, tuple[float, int]] = {}

    def holds(factor: float) -> bool:
        requests = trial(inputs.workload, factor, least_s, least_requests)
        sizes[factor] = trial_s(requests), len(requests)
        outcome = FleetRuns(inputs.profile, requests, inputs.options).run(policy)
        tried[factor * rate] = outcome.all.slo_attainment(slo)
        return tried[factor * rate] >= attainment

    highest = highest_rate(holds, 1.0)
    seconds, num_requests = sizes.get(highest or 0.0, sizes[max(sizes)])
    return Capacity(
        rps=None if highest is None else highest * rate,
        tried=sorted(tried.items()),
        trial_s=seconds,
        least_s=least_s,
        trial_requests=num_requests,
        least_requests=least_requests,
    )
