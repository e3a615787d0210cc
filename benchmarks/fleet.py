"""Policies of fleets on the papers' workloads: what they attain, what they sustain, and how fast they decide.

    python -m benchmarks.fleet decisions                         # on a quiet machine, a minute
    python -m benchmarks.fleet sixty loraserve dlora auto --data DIR  # hours on two cores

Sections:  decisions  seconds of one routing decision, of a placement and of a migration
           sixty      60 servers, 40,000 adapters: every policy at the rate where `random` attains 90%
           loraserve  4, 8 and 12 servers: the highest rate with a P95 TTFT of 10 s
           dlora      8 replicas, 32 adapters with bursts: the highest rate with a mean time per token
           auto       our policy beside all others: the highest rate with 99% within the SLO, and the loads of
                      adapters at the rate that `affinity` sustains

Every run is written to results/fleet.json when it ends, and a run that the file holds of the same code is not
made again: sections can be made in several calls. `--data`: published traces (docs/workloads.md); without
them the papers' workloads are synthetic. `--tiny` tries the script itself, and writes nothing unless --out
says where.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import sources
from benchmarks.fleet_decisions import measure_decisions
from benchmarks.fleet_tables import AFTER_FIRST
from loraplex.bench.environment import environment
from loraplex.core.whole_file import write_whole
from loraplex.fleet.policy import Policy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.twin.fleet import FleetOutcome
from loraplex.twin.fleet_figures import figures_of
from loraplex.twin.fleet_run import BaseTimes, FleetOptions, FleetRuns, base_times
from loraplex.twin.highest_rate import highest_rate
from loraplex.twin.links import LinkSpeed
from loraplex.twin.operating_points import operating_points
from loraplex.twin.replay import ReplayOptions
from loraplex.twin.slo import Slo
from loraplex.workload.jsonl import WorkloadRequest
from loraplex.workload.papers import paper_workload

FILE: Final = "fleet.json"
RESULTS: Final = Path(__file__).parent / "results"
PACKAGES: Final = ("loraplex", "numpy", "highspy")
SECTIONS: Final = ("decisions", "sixty", "loraserve", "dlora", "auto")
PADDED, OWN_RANKS = "h200-llama-2-7b-padded", "h200-llama-2-7b"
KERNELS: Final = {"padded": PADDED, "rank-proportional": OWN_RANKS}
LINK: Final = LinkSpeed(bytes_per_s=25e9)
SEEDS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a fleet has to attain. `tpt` and `tpot`: times what the base model takes alone. `share`: of the
    requests that must be within all limits; None if their mean time per token must be."""

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


SIXTY_GOALS: Final = {"": Goal(tpt=1.5, share=0.9), AFTER_FIRST: Goal(tpot=1.5, share=0.9)}
LORASERVE_GOAL: Final = Goal(ttft_s=10.0, share=0.95)
DLORA_GOAL: Final = Goal(tpt=10.0, share=None)
PACE: Final = Goal(tpot=1.5, ttft_s=1.0)
"""Unlike a time per token from arrival on, it can be held for an answer of two tokens."""

SIXTY: Final = (
    "random",
    "most-idle",
    "first-fit",
    "pending-time",
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
TRACES: Final = tuple(
    f"loraserve-{arrivals}-{popularity}"
    for arrivals in ("regular", "poisson")
    for popularity in ("uniform", "shifting", "exponential")
)
DLORA: Final = (
    "round-robin+random",
    "pending-time+burst-tolerance",
    "pending-time+burst-tolerance+migrate",
    "auto",
)
"""Round robin, the proactive half of dLoRA, dLoRA, ours."""
OTHERS: Final = (
    "most-idle",
    "rank-aware",
    "pending-time+burst-tolerance+migrate",
    "routing-table+loraserve",
    "affinity",
    "rendezvous",
    "oracle",
)
"""All that `auto` is held against."""
AUTO: Final = (
    # workload, replicas, requests/s on each to begin at, seconds of arrivals
    ("toppings-8-servers", 8, 14.0, 60.0, PACE),
    ("loraserve-rank-skew", 4, 16.0, 60.0, Goal(ttft_s=10.0)),
    ("loraserve-poisson-shifting", 4, 12.0, 60.0, Goal(ttft_s=10.0)),
    ("dlora-bursty", 8, 8.0, 120.0, PACE),
    ("maf", 8, 14.0, 60.0, PACE),
    ("servegen", 8, 4.0, 120.0, Goal(tpot=3.0, ttft_s=1.0)),
)
"""In ServeGen a long prompt beside a short answer takes it beyond half as long again under any policy."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A workload of a paper on a fleet. `rate`: requests/s. `num_adapters`: None as the paper has it."""

    paper: str
    profile: str
    num_replicas: int
    duration_s: float
    data: Path | None
    rate: float
    goal: Goal
    num_adapters: int | None = None
    period_s: float = 60.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One policy on a fleet, which has a name. `step`: None to run it at the fleet's rate; otherwise the
    highest rate is looked for at which it reaches its goal, from the fleet's rate on by this factor."""

    name: str
    fleet: Fleet
    policy: str
    step: float | None = None

    @property
    def key(self) -> str:
        """By which its result is found."""
        return key_of(self.name, self.policy, self.fleet.seed, is_search=self.step is not None)


def key_of(name: str, policy: str, seed: int = 0, *, is_search: bool) -> str:
    return f"{name}, {'capacity of ' if is_search else ''}{policy}, seed {seed}"


# ---- in the workers


@lru_cache(maxsize=2)
def inputs_of(fleet: Fleet) -> tuple[CostModel, Sequence[WorkloadRequest], FleetOptions]:
    profile = find_profile(Path(fleet.profile))
    assert isinstance(profile, CostModel)
    made = paper_workload(
        fleet.paper,
        data=fleet.data,
        rate=fleet.rate,
        duration_s=fleet.duration_s,
        num_adapters=fleet.num_adapters,
        seed=fleet.seed,
    )
    requests, header = list(made), made.header
    assert header is not None
    replay = ReplayOptions(num_adapters=header.num_adapters, ranks=header.ranks)
    options = FleetOptions(
        num_replicas=fleet.num_replicas,
        replay=replay,
        slo=fleet.goal.slo(base_times(profile, requests, replay)),
        period_s=fleet.period_s,
        link=LINK,
    )
    return profile, requests, options


def perform(run: Run) -> dict[str, Any]:
    """Simulate a run, or bisect its rate; return its figures, or its capacity."""
    profile, requests, options = inputs_of(run.fleet)
    policy = Policy.of_name(run.policy)
    if policy.placement == "loraserve":
        options = replace(options, points=_points(run.fleet))
    started = time.process_time()
    if run.step is None:
        runs = FleetRuns(profile, requests, options)
        outcome = runs.run(policy, run.fleet.seed)
        held = (outcome.most_bytes_held or 0) / float(runs.adapters.num_bytes.sum())
        found = {
            "rate_rps": run.fleet.rate,
            **_figures(outcome, options.slo),
            "held_over_everywhere": round(held, 4),
        }
    else:
        found = {"capacity_rps": _capacity(run.fleet, policy, options, run.step)}
    return {
        "fleet": run.name,
        "policy": run.policy,
        "seed": run.fleet.seed,
        **found,
        "cpu_s": round(time.process_time() - started, 1),
    }


@lru_cache(maxsize=2)
def _points(fleet: Fleet) -> Any:
    profile, requests, options = inputs_of(fleet)
    return operating_points(profile, requests, options.replay)


def _capacity(fleet: Fleet, policy: Policy, options: FleetOptions, step: float) -> float | None:
    """Return the highest rate at which the goal is reached: at each the workload is made anew, and lasts as
    long."""

    def is_reached(rate: float) -> bool:
        profile, requests, _ = inputs_of(replace(fleet, rate=rate))
        outcome = FleetRuns(profile, requests, options).run(policy, fleet.seed)
        return fleet.goal.is_reached(outcome, options.slo)

    highest = highest_rate(is_reached, fleet.rate, factor=step)
    return None if highest is None or not math.isfinite(highest) else round(highest, 3)


def _figures(outcome: FleetOutcome, slo: Slo) -> dict[str, Any]:
    waits_s = [ttft_s for each in outcome.all.requests if (ttft_s := each.ttft_s) is not None]
    fleet_p99_s = float(np.quantile(waits_s, 0.99)) if waits_s else math.nan
    by_adapter = outcome.all.ttft_p99_by_adapter()
    return {
        **asdict(figures_of(outcome, slo)),
        "num_requests": len(outcome.all.requests),
        "attainment_after_first_token": outcome.all.slo_attainment(Slo(tpot_s=slo.token_s)),
        "worst_adapter_over_fleet": max(by_adapter.values()) / fleet_p99_s if by_adapter else None,
    }


# ---- sections

FAR, NEAR = 1.5, 1.1
"""Steps of a search: where nothing is known, and from the rate that another policy or seed sustains."""


def sixty(size: Size) -> Iterator[list[Run]]:
    """First the rate at which `random` attains 90%, then every policy at that rate; by the papers' time per
    token, and by the time per token after the first, which is not about the shortest answers."""
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
    """What every policy sustains on each fleet: the first one is looked for from far, which tells where to
    look for the others, and those tell it for other seeds."""
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
            step=NEAR,
        )
        for name, fleet in fleets.items()
        for policy in policies
        if (rate := size.found[key_of(name, policy, is_search=True)]["capacity_rps"]) is not None
        for seed in range(1, size.num_seeds)
    ]


def loraserve(size: Size) -> Iterator[list[Run]]:
    """All seeds on the smallest fleet, one on the larger ones."""
    for num_replicas in (size.num_replicas,) if size.num_replicas else (4, 8, 12):
        fleets = {
            f"{num_replicas} servers, {trace}": Fleet(
                paper=trace,
                profile=PADDED,
                num_replicas=num_replicas,
                duration_s=size.duration_s or 60.0,
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


def dlora(size: Size) -> Iterator[list[Run]]:
    fleet = Fleet(
        paper="dlora-bursty",
        profile=PADDED,
        num_replicas=size.num_replicas or 8,
        duration_s=size.duration_s or 120.0,
        rate=size.rate or 80.0,
        data=size.data,
        goal=DLORA_GOAL,
    )
    yield from capacities(size, {"8 replicas": fleet}, DLORA)


def auto(size: Size) -> Iterator[list[Run]]:
    """First what every policy sustains, then `auto` and `affinity` at the rate that the latter sustains."""
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
    yield [
        Run(
            name=name,
            fleet=replace(fleet, rate=rate, seed=seed),
            policy=policy,
        )
        for name, fleet in fleets.items()
        if (rate := size.found[key_of(name, "affinity", is_search=True)]["capacity_rps"]) is not None
        for policy in ("affinity", "auto")
        for seed in range(size.num_seeds)
    ]


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a section is made with. `sixty`: the workload of the section of that name. `found`: the results of
    runs so far, by their keys."""

    data: Path | None
    num_replicas: int | None
    sixty: str
    duration_s: float | None
    rate: float | None
    num_seeds: int
    found: dict[str, Any]

    def rate_found(self, run: Run) -> float:
        """Return the rate that a search has found."""
        rate = self.found[run.key]["capacity_rps"]
        if rate is None:
            sys.exit(f"{run.key}: no rate was found; begin at another with --rate")
        return float(rate)

    @property
    def parameters(self) -> dict[str, Any]:
        """Return what results must have in common to stand in one section."""
        chosen = ("num_replicas", "sixty", "duration_s", "rate")
        return {name: getattr(self, name) for name in chosen} | {"published_data": self.data is not None}


RUNS: Final[dict[str, Callable[[Size], Iterator[list[Run]]]]] = {
    "sixty": sixty,
    "loraserve": loraserve,
    "dlora": dlora,
    "auto": auto,
}


def make_section(name: str, section: dict[str, Any], size: Size, save: Callable[[], None]) -> None:
    """Perform the runs that the section lacks, on all cores; each is saved when it ends."""
    found: dict[str, Any] = section.setdefault("runs", {})
    size = replace(size, found=found)
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for runs in RUNS[name](size):
            tasks = {pool.submit(perform, run): run for run in runs if run.key not in found}
            for number, task in enumerate(as_completed(tasks), start=1):
                run = tasks[task]
                found[run.key] = task.result()
                save()
                print(f"{name} {number}/{len(tasks)}: {run.key}: {found[run.key]}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--data", type=Path, help="folder with the published traces")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--replicas", type=int, help="default: as the section's paper")
    parser.add_argument("--duration-s", type=float, help="of arrivals")
    parser.add_argument("--rate", type=float, help="requests/s at which a search begins")
    parser.add_argument("--tiny", action="store_true", help="small fleets: tries the script")
    parser.add_argument("--out", type=Path, help="default: results/fleet.json, nothing if --tiny")
    args = parser.parse_args(argv)
    out: Path | None = args.out or (None if args.tiny else RESULTS / FILE)
    document: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.is_file() else {}

    def save() -> None:
        if out is not None:
            write_whole(out, json.dumps(document, indent=1) + "\n")

    size = Size(
        data=args.data,
        num_replicas=2 if args.tiny else args.replicas,
        sixty="toppings-8-servers" if args.tiny else "toppings-60-servers",
        duration_s=4.0 if args.tiny else args.duration_s,
        rate=8.0 if args.tiny else args.rate,
        num_seeds=1 if args.tiny else args.seeds,
        found={},
    )
    for name in args.sections:
        here = environment(PACKAGES) | {
            "sources": sources.fingerprints(FILE, name),
            "parameters": size.parameters,
        }
        held = document.get(name, {})
        if any(held.get(key) != here[key] for key in ("sources", "parameters")):
            held = {}
        section = document[name] = {**held, **here}
        if name == "decisions":
            section["results"] = measure_decisions(tiny=args.tiny)
            print(json.dumps(section["results"], indent=1), flush=True)
        else:
            make_section(name, section, size, save)
        save()


if __name__ == "__main__":
    main()
