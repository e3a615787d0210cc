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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import sources
from benchmarks.fleet_decisions import measure_decisions
from loraplex.bench.environment import environment
from loraplex.core.whole_file import write_whole
from loraplex.fleet.policy import Policy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.twin.fleet import FleetOutcome
from loraplex.twin.fleet_figures import figures_of
from loraplex.twin.fleet_run import FleetOptions, FleetRuns, base_tpt_s
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
SLO: Final = 1.5
"""Times what the base model takes for a token of a request that is alone."""
DLORA_SLO: Final = 10.0
LINK: Final = LinkSpeed(bytes_per_s=25e9)
LORASERVE_SLO: Final = Slo(ttft_s=10.0)
SEEDS: Final = 5

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
)
"""All that `auto` is held against."""
AUTO: Final = (
    # workload, replicas, requests/s on each to begin at
    ("toppings-8-servers", 8, 10.0),
    ("loraserve-rank-skew", 4, 4.0),
    ("loraserve-poisson-shifting", 4, 4.0),
    ("dlora-bursty", 8, 6.0),
    ("maf", 8, 8.0),
    ("servegen", 8, 4.0),
)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A workload of a paper on a fleet. `rate`: requests/s. `num_adapters`: None as the paper has it."""

    paper: str
    profile: str
    num_replicas: int
    duration_s: float
    data: Path | None
    rate: float
    num_adapters: int | None = None
    period_s: float = 60.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One policy on a fleet: at its rate, or the highest rate at which `holds`, looked for from there on."""

    key: str
    fleet: Fleet
    policy: str
    holds: str | None = None


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
        slo=Slo(tpt_s=SLO * base_tpt_s(profile, requests, replay)),
        period_s=fleet.period_s,
        link=LINK,
    )
    return profile, requests, options


def _mean_held(outcome: FleetOutcome, slo: Slo) -> bool:
    tpt_s = outcome.all.summary()["tpt_s"]
    assert slo.tpt_s is not None
    return tpt_s is not None and tpt_s["mean"] <= DLORA_SLO / SLO * slo.tpt_s


HOLDS: Final[dict[str, Callable[[FleetOutcome, Slo], bool]]] = {
    "tpt 90%": lambda outcome, slo: outcome.all.slo_attainment(slo) >= 0.9,
    "tpt 99%": lambda outcome, slo: outcome.all.slo_attainment(slo) >= 0.99,
    "ttft p95": lambda outcome, _: outcome.all.slo_attainment(LORASERVE_SLO) >= 0.95,
    "mean tpt": _mean_held,
}
"""Whether an outcome is good enough, by the SLO that the fleet's routers see or by a paper's own."""


def perform(run: Run) -> dict[str, Any]:
    """Simulate a run, or bisect its rate; return its figures, or its capacity."""
    profile, requests, options = inputs_of(run.fleet)
    policy = Policy.of_name(run.policy)
    if policy.placement == "loraserve":
        options = replace(options, points=_points(run.fleet))
    started = time.process_time()
    if run.holds is None:
        runs = FleetRuns(profile, requests, options)
        outcome = runs.run(policy, run.fleet.seed)
        held = (outcome.most_bytes_held or 0) / float(runs.adapters.num_bytes.sum())
        found = {
            "rate_rps": run.fleet.rate,
            **_figures(outcome, options.slo),
            "held_over_everywhere": round(held, 4),
        }
    else:
        found = {"capacity_rps": _capacity(run.fleet, policy, HOLDS[run.holds], options)}
    return {
        "policy": policy.name,
        "seed": run.fleet.seed,
        **found,
        "cpu_s": round(time.process_time() - started, 1),
    }


@lru_cache(maxsize=2)
def _points(fleet: Fleet) -> Any:
    profile, requests, options = inputs_of(fleet)
    return operating_points(profile, requests, options.replay)


def _capacity(
    fleet: Fleet, policy: Policy, holds: Callable[[FleetOutcome, Slo], bool], options: FleetOptions
) -> float | None:
    """Return the highest rate that holds: at each the workload is made anew, and lasts as long."""

    def holds_at(rate: float) -> bool:
        profile, requests, _ = inputs_of(replace(fleet, rate=rate))
        return holds(FleetRuns(profile, requests, options).run(policy, fleet.seed), options.slo)

    highest = highest_rate(holds_at, fleet.rate)
    return None if highest is None or not math.isfinite(highest) else round(highest, 3)


def _figures(outcome: FleetOutcome, slo: Slo) -> dict[str, Any]:
    waits_s = [ttft_s for each in outcome.all.requests if (ttft_s := each.ttft_s) is not None]
    fleet_p99_s = float(np.quantile(waits_s, 0.99)) if waits_s else math.nan
    by_adapter = outcome.all.ttft_p99_by_adapter()
    return {
        **asdict(figures_of(outcome, slo)),
        "num_requests": len(outcome.all.requests),
        "worst_adapter_over_fleet": max(by_adapter.values()) / fleet_p99_s if by_adapter else None,
    }


# ---- sections


def sixty(size: Size) -> Iterator[list[Run]]:
    """First the rate at which `random` attains 90%, then every policy at that rate."""
    fleets = {
        kernels: Fleet(
            paper=size.sixty,
            profile=profile,
            num_replicas=size.num_replicas or 60,
            duration_s=size.duration_s or 30.0,
            rate=size.rate or 600.0,
            data=size.data,
        )
        for kernels, profile in (("padded", PADDED), ("rank-proportional", OWN_RANKS))
    }
    rates = [
        Run(key=f"{kernels}, rate of random", fleet=fleet, policy="random", holds="tpt 90%")
        for kernels, fleet in fleets.items()
    ]
    yield rates
    runs = []
    for found, (kernels, fleet) in zip(rates, fleets.items(), strict=True):
        rate = size.found[found.key]["capacity_rps"]
        if rate is None:
            sys.exit(f"{found.key}: none was found; begin at another with --rate")
        runs += [
            Run(
                key=f"{kernels}, {policy}, seed {seed}",
                fleet=replace(fleet, rate=rate, seed=seed),
                policy=policy,
            )
            for seed in range(size.num_seeds)
            for policy in SIXTY
        ]
    yield runs


def loraserve(size: Size) -> Iterator[list[Run]]:
    for num_replicas in (size.num_replicas,) if size.num_replicas else (4, 8, 12):
        yield [
            Run(
                key=f"{num_replicas} servers, {trace}, {policy}",
                fleet=Fleet(
                    paper=trace,
                    profile=PADDED,
                    num_replicas=num_replicas,
                    duration_s=size.duration_s or 120.0,
                    num_adapters=25 * num_replicas // 4,
                    rate=size.rate or 8.0 * num_replicas,
                    data=size.data,
                    period_s=20.0,
                ),
                policy=policy,
                holds="ttft p95",
            )
            for trace in TRACES
            for policy in LORASERVE
        ]


def dlora(size: Size) -> Iterator[list[Run]]:
    fleet = Fleet(
        paper="dlora-bursty",
        profile=PADDED,
        num_replicas=size.num_replicas or 8,
        duration_s=size.duration_s or 300.0,
        rate=size.rate or 60.0,
        data=size.data,
    )
    yield [
        Run(
            key=f"{policy}, seed {seed}",
            fleet=replace(fleet, seed=seed),
            policy=policy,
            holds="mean tpt",
        )
        for seed in range(size.num_seeds)
        for policy in DLORA
    ]


def auto(size: Size) -> Iterator[list[Run]]:
    """First what every policy sustains, then `auto` and `affinity` at the rate that the latter sustains."""
    fleets = {
        f"{paper}, {kernels}": Fleet(
            paper=paper,
            profile=profile,
            num_replicas=size.num_replicas or num_replicas,
            duration_s=size.duration_s or 60.0,
            rate=size.rate or rate * num_replicas,
            data=size.data,
            period_s=20.0,
        )
        for paper, num_replicas, rate in AUTO
        for kernels, profile in (("padded", PADDED), ("rank-proportional", OWN_RANKS))
    }
    yield [
        Run(key=f"{name}, {policy}", fleet=fleet, policy=policy, holds="tpt 99%")
        for name, fleet in fleets.items()
        for policy in (*OTHERS, "auto")
    ]
    rates = {name: size.found[f"{name}, affinity"]["capacity_rps"] for name in fleets}
    yield [
        Run(
            key=f"{name}, {policy}, seed {seed}",
            fleet=replace(fleet, rate=rates[name], seed=seed),
            policy=policy,
        )
        for name, fleet in fleets.items()
        if rates[name] is not None
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
        if any(held.get(key) != here[key] for key in ("sources", "parameters", "machine")):
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
