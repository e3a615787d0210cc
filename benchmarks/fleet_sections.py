"""The runs of each section of `benchmarks.fleet`: policies, fleets, workloads and goals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet_tables import AFTER_FIRST
from loraplex.twin.fleet import FleetOutcome
from loraplex.twin.fleet_run import BaseTimes
from loraplex.twin.slo import Slo

PADDED, OWN_RANKS = "h200-llama-2-7b-padded", "h200-llama-2-7b"
KERNELS: Final = {"padded": PADDED, "rank-proportional": OWN_RANKS}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal of a fleet. `tpt` and `tpot`: multiples of the base model's times alone. `share`: the share of
    requests that must be within all limits; None if the mean time per token must be."""

    tpt: float | None = None
    tpot: float | None = None
    ttft_s: float | None = None
    share: float | None = 0.99

    def slo(self, base: BaseTimes) -> Slo:
        return Slo(
            tpt_s=None if self.tpt is None else self.tpt * base.tpt_s,
            tpot_s=None if self.tpot is None else self.tpot * base.tpot_s,
            ttft_s=self.ttft_s,
        )

    def is_reached(self, outcome: FleetOutcome, slo: Slo) -> bool:
        if self.share is not None:
            return outcome.all.slo_attainment(slo) >= self.share
        tpt_s = outcome.all.summary()["tpt_s"]
        assert slo.tpt_s is not None
        return tpt_s is not None and tpt_s["mean"] <= slo.tpt_s


WARM: Final = True
"""True if fleets have served before, unless a run says otherwise: in a workload of two minutes, one period
without a plan would count for more than in a fleet that serves for days."""
SIXTY_GOALS: Final = {"": Goal(tpt=1.5, share=0.9), AFTER_FIRST: Goal(tpot=1.5, share=0.9)}
LORASERVE_GOAL: Final = Goal(ttft_s=10.0, share=0.95)
DLORA_GOAL: Final = Goal(tpt=10.0, share=None)
PACE: Final = Goal(tpot=1.5, ttft_s=1.0)
"""Unlike a limit on the time per token since arrival, it can be met for an answer of two tokens."""

SIXTY: Final = (
    "random",
    "most-idle",
    "first-fit",
    "pending-time",
    "pending-time+burst-tolerance+migrate",
    "rank-aware",
    "affinity",
    "rendezvous",
    "auto",
)
LORASERVE: Final = (
    "most-idle+random",
    "most-idle+contiguous",
    "rank-aware+everywhere",
    "routing-table+loraserve",
    "auto",
)
"""S-LoRA's two baselines, Toppings, LoRAServe, ours."""
LORASERVE_STORAGE: Final = ("rank-aware+everywhere", "routing-table+loraserve", "auto")
"""The policies whose storage is compared, at the rate that the first baseline sustains."""
TRACES: Final = tuple(
    f"loraserve-{arrivals}-{popularity}"
    for arrivals in ("regular", "poisson")
    for popularity in ("uniform", "shifting", "exponential")
)
DLORA: Final = (
    "round-robin+burst-tolerance",
    "round-robin+random",
    "pending-time+burst-tolerance",
    "pending-time+burst-tolerance+migrate",
    "auto",
)
"""Round robin over the copies that dLoRA places, and with one copy of each adapter; the proactive half of
dLoRA; dLoRA; ours."""
OTHERS: Final = (
    "most-idle",
    "rank-aware",
    "pending-time+burst-tolerance+migrate",
    "routing-table+loraserve",
    "affinity",
    "rendezvous",
    "oracle",
)
"""The policies that `auto` is compared with: each paper's best, today's peers, and an oracle."""
AUTO: Final = (
    # workload, replicas, requests/s per replica to start at, seconds of arrivals, goal
    ("toppings-8-servers", 8, 14.0, 60.0, PACE),
    ("loraserve-rank-skew", 4, 16.0, 120.0, Goal(ttft_s=10.0)),
    ("loraserve-poisson-shifting", 4, 12.0, 120.0, Goal(ttft_s=10.0)),
    ("dlora-bursty", 8, 8.0, 120.0, PACE),
    ("maf", 8, 14.0, 60.0, PACE),
    ("servegen", 8, 4.0, 120.0, Goal(tpot=3.0, ttft_s=1.0)),
)
"""The workloads of the section `auto`. ServeGen has another goal: a long prompt with a short answer exceeds a
factor of 1.5 under any policy there."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A paper's workload on a fleet. `rate`: requests/s. `num_adapters`: None for the paper's number.
    `warm`: it has served before, so that its first plan knows the adapters' popularity."""

    paper: str
    profile: str
    num_replicas: int
    duration_s: float
    data: Path | None
    rate: float
    goal: Goal
    num_adapters: int | None = None
    period_s: float = 60.0
    warm: bool = WARM
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One policy on a named fleet. `step`: None to run it at the fleet's rate; otherwise search for the
    highest rate at which it reaches its goal, from the fleet's rate on by this factor."""

    name: str
    fleet: Fleet
    policy: str
    step: float | None = None

    @property
    def key(self) -> str:
        """The key of its result."""
        return key_of(self.name, self.policy, self.fleet.seed, is_search=self.step is not None)


def key_of(name: str, policy: str, seed: int = 0, *, is_search: bool) -> str:
    return f"{name}, {'capacity of ' if is_search else ''}{policy}, seed {seed}"


TOLERANCE: Final = 0.02
"""Relative distance of a sustained rate and one that is not, at which a search ends. The result is the lower
one: too low by half of this on average, for all policies alike."""
FAR, NEAR, NEXT_SEED = 1.5, 1.1, 1.04
"""Steps of a search: without prior knowledge, from the rate that another policy sustains, and from the rate
that the same policy sustains with another seed."""


def sixty(size: Size) -> Iterator[list[Run]]:
    """Yield the search for the rate at which `random` attains 90%, then every policy at that rate; by the
    papers' time per token, and by the time per token after the first, which short answers do not dominate."""
    fleets = {
        f"{kernels}{about}": Fleet(
            paper=size.sixty,
            profile=profile,
            num_replicas=size.num_replicas or 60,
            duration_s=size.duration_s or 30.0,
            rate=size.rate or 600.0,
            data=size.data,
            goal=goal,
        )
        for about, goal in SIXTY_GOALS.items()
        for kernels, profile in KERNELS.items()
    }
    rates = {name: Run(name=name, fleet=fleet, policy="random", step=FAR) for name, fleet in fleets.items()}
    yield list(rates.values())
    yield [
        Run(
            name=name,
            fleet=replace(fleet, rate=size.rate_found(rates[name]), seed=seed),
            policy=policy,
        )
        for name, fleet in fleets.items()
        for seed in range(size.num_seeds)
        for policy in SIXTY
    ]


def capacities(size: Size, fleets: Mapping[str, Fleet], policies: Sequence[str]) -> Iterator[list[Run]]:
    """Yield the searches for every policy's capacity. The first policy's search starts without knowledge; its
    result is the start for the others, and theirs for other seeds."""
    first, *others = policies
    runs = {name: Run(name=name, fleet=fleet, policy=first, step=FAR) for name, fleet in fleets.items()}
    yield list(runs.values())
    yield [
        Run(
            name=name,
            fleet=replace(fleet, rate=size.rate_found(runs[name])),
            policy=policy,
            step=NEAR,
        )
        for name, fleet in fleets.items()
        for policy in others
    ]
    yield [
        Run(
            name=name,
            fleet=replace(fleet, rate=rate, seed=seed),
            policy=policy,
            step=NEXT_SEED,
        )
        for name, fleet in fleets.items()
        for policy in policies
        if (rate := size.found[key_of(name, policy, is_search=True)]["capacity_rps"])
        for seed in range(1, size.num_seeds)
    ]


def at_rate_of(
    size: Size, fleets: Mapping[str, Fleet], sustaining: str, policies: Sequence[str]
) -> list[Run]:
    """Return a run of each policy and seed at the rate that another policy sustains."""
    return [
        Run(name=name, fleet=replace(fleet, rate=rate, seed=seed), policy=policy)
        for name, fleet in fleets.items()
        if (rate := size.found[key_of(name, sustaining, is_search=True)]["capacity_rps"])
        for policy in policies
        for seed in range(size.num_seeds)
    ]


def loraserve(size: Size) -> Iterator[list[Run]]:
    """Yield all seeds on the smallest fleet, one on the larger ones: first the capacity of every policy, then
    what some of them hold at the rate that S-LoRA's random placement sustains."""
    for num_replicas in (size.num_replicas,) if size.num_replicas else (4, 8, 12):
        fleets = {
            f"{num_replicas} servers, {trace}": Fleet(
                paper=trace,
                profile=PADDED,
                num_replicas=num_replicas,
                duration_s=size.duration_s or 120.0,
                num_adapters=25 * num_replicas // 4,
                rate=size.rate or 12.0 * num_replicas,
                data=size.data,
                goal=LORASERVE_GOAL,
                period_s=20.0,
            )
            for trace in TRACES
        }
        seeds = size if num_replicas <= 4 else replace(size, num_seeds=1)
        yield from capacities(seeds, fleets, LORASERVE)
        yield at_rate_of(seeds, fleets, LORASERVE[0], LORASERVE_STORAGE)


def dlora(size: Size) -> Iterator[list[Run]]:
    """Yield runs with a first plan that knows the popularity, and without, which is what migration is for."""
    fleet = Fleet(
        paper="dlora-bursty",
        profile=PADDED,
        num_replicas=size.num_replicas or 8,
        duration_s=size.duration_s or 120.0,
        rate=size.rate or 80.0,
        data=size.data,
        goal=DLORA_GOAL,
    )
    fleets = {"known": fleet, "not known at first": replace(fleet, warm=False)}
    yield from capacities(size, fleets, DLORA)


def auto(size: Size) -> Iterator[list[Run]]:
    """Yield the capacity of every policy, then `auto` and `affinity` at the rate that the latter sustains."""
    fleets = {
        f"{paper}, {kernels}": Fleet(
            paper=paper,
            profile=profile,
            num_replicas=size.num_replicas or num_replicas,
            duration_s=size.duration_s or duration_s,
            rate=size.rate or rate * num_replicas,
            data=size.data,
            goal=goal,
            period_s=20.0,
        )
        for paper, num_replicas, rate, duration_s, goal in AUTO
        for kernels, profile in KERNELS.items()
    }
    yield from capacities(size, fleets, (*OTHERS, "auto"))
    yield at_rate_of(size, fleets, "affinity", ("affinity", "auto"))


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a section. `sixty`: the workload of the section of that name. `found`: results of runs so
    far, by key."""

    data: Path | None
    num_replicas: int | None
    sixty: str
    duration_s: float | None
    rate: float | None
    num_seeds: int
    found: dict[str, Any]

    def rate_found(self, run: Run) -> float:
        """Return the rate that a search found; exits if there is none."""
        rate = self.found[run.key]["capacity_rps"]
        if not rate:
            sys.exit(f"{run.key}: no rate was found; begin at another with --rate")
        return float(rate)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that results of one section must share."""
        chosen = ("num_replicas", "sixty", "duration_s", "rate")
        return {name: getattr(self, name) for name in chosen} | {
            "published_data": self.data is not None,
            "tolerance": TOLERANCE,
            "warm": WARM,
        }


RUNS: Final[dict[str, Callable[[Size], Iterator[list[Run]]]]] = {
    "sixty": sixty,
    "loraserve": loraserve,
    "dlora": dlora,
    "auto": auto,
}
