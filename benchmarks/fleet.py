"""Fleet policies on the papers' workloads: what they attain, their capacity, and how fast they decide.

    python -m benchmarks.fleet decisions                         # on a quiet machine, a minute
    python -m benchmarks.fleet sixty loraserve dlora auto --data DIR  # hours on two cores

Sections:  decisions  seconds of one routing decision, of a placement and of a migration
           bounds     the most that can be gained by keeping ranks apart; takes seconds
           sixty      60 servers, 40,000 adapters: every policy at the rate where `random` attains 90%
           loraserve  4, 8 and 12 servers: the highest rate with a P95 TTFT of 10 s, and what hosts hold at
                      the rate that S-LoRA's random placement sustains
           dlora      8 replicas, 32 adapters with bursts: the highest rate with a mean time per token
           auto       our policy beside all others: the highest rate with 99% within the SLO, and the loads of
                      adapters at the rate that `affinity` sustains

Every run is written to results/fleet.json when it ends, and a run that the file already holds for the same
code is not repeated: sections can be made in several calls, and a change of our own policy repeats its runs
alone. `--data`: published traces (docs/workloads.md); without them the papers' workloads are synthetic.
`--tiny` tests the script itself, and writes nothing without --out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import sources
from benchmarks.fleet_bounds import measure_bounds
from benchmarks.fleet_decisions import measure_decisions
from benchmarks.fleet_sections import RUNS, TOLERANCE, Fleet, Run, Size
from loraplex.bench.environment import environment
from loraplex.core.whole_file import write_whole
from loraplex.fleet.policy import AUTO, ORACLE, PLACEMENTS, Policy
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
from loraplex.twin.worker_pool import worker_pool
from loraplex.workload.jsonl import WorkloadRequest
from loraplex.workload.papers import paper_workload

FILE: Final = "fleet.json"
RESULTS: Final = Path(__file__).parent / "results"
PACKAGES: Final = ("loraplex", "numpy", "highspy")
SECTIONS: Final = ("decisions", "bounds", "sixty", "loraserve", "dlora", "auto")
LINK: Final = LinkSpeed(bytes_per_s=25e9)
SEEDS: Final = 5
_ALONE_RPS: Final = 20.0
_ALONE_S: Final = 60.0
"""Rate and duration of the workload whose requests the base model serves alone."""


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
        slo=fleet.goal.slo(_base_times(fleet.paper, fleet.profile, fleet.data)),
        period_s=fleet.period_s,
        link=LINK,
        warm=fleet.warm,
    )
    return profile, requests, options


def perform(run: Run) -> dict[str, Any]:
    """Simulate a run, or search for its highest rate; return its figures or its capacity."""
    profile, requests, options = inputs_of(run.fleet)
    policy = Policy.of_name(run.policy)
    named = PLACEMENTS[policy.placement]
    if named is not None and named.needs_points:
        options = replace(options, points=_points(replace(run.fleet, seed=0)))  # found once, beforehand
    started = time.process_time()
    if run.step is None:
        runs = FleetRuns(profile, requests, options)
        outcome = runs.run(policy, run.fleet.seed)
        # With a copy of everything everywhere, every host holds all adapters, including the fullest.
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
def _base_times(paper: str, profile: str, data: Path | None) -> BaseTimes:
    """Return the times of the base model alone, which are the same for all rates, seeds and policies."""
    found = find_profile(Path(profile))
    made = paper_workload(paper, data=data, rate=_ALONE_RPS, duration_s=_ALONE_S)
    requests, header = list(made), made.header
    assert header is not None
    return base_times(found, requests, ReplayOptions(num_adapters=header.num_adapters, ranks=header.ranks))


@lru_cache(maxsize=2)
def _points(fleet: Fleet) -> Any:
    profile, requests, options = inputs_of(fleet)
    return operating_points(profile, requests, options.replay)


def _capacity(fleet: Fleet, policy: Policy, options: FleetOptions, step: float) -> float | None:
    """Return the highest rate at which the goal is reached: 0 if there is none, None if it is reached at all
    rates. The workload is made anew at each rate, with the same duration."""

    def is_reached(rate: float) -> bool:
        profile, requests, _ = inputs_of(replace(fleet, rate=rate))
        outcome = FleetRuns(profile, requests, options).run(policy, fleet.seed)
        return fleet.goal.is_reached(outcome, options.slo)

    highest = highest_rate(is_reached, fleet.rate, TOLERANCE, step)
    if highest is None:
        return 0.0
    return round(highest, 3) if math.isfinite(highest) else None


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


def make_section(name: str, section: dict[str, Any], size: Size, save: Callable[[], None]) -> None:
    """Perform the runs that the section lacks, on all cores; each is saved when it ends. Finally they are put
    in the order in which the section names them."""
    found: dict[str, Any] = section.setdefault("runs", {})
    size = replace(size, found=found)
    keys: list[str] = []
    with worker_pool(len(os.sched_getaffinity(0))) as pool:
        for runs in RUNS[name](size):
            keys += (run.key for run in runs)
            tasks = {pool.submit(perform, run): run for run in runs if run.key not in found}
            for number, task in enumerate(as_completed(tasks), start=1):
                run = tasks[task]
                found[run.key] = task.result()
                save()
                print(f"{name} {number}/{len(tasks)}: {run.key}: {found[run.key]}", flush=True)
    section["runs"] = {key: found[key] for key in keys}


def kept(held: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a stored section that is still valid: runs with the same sizes and the same code. If
    only the code of our own policy has changed, the runs of others stay."""
    recorded = held.get("sources", {})
    changed = {path for path, digest in here["sources"].items() if recorded.get(path) != digest}
    if held.get("parameters") != here["parameters"] or not changed <= {*sources.AUTO}:
        return {}
    if not changed:
        return held
    ours = (AUTO, ORACLE)
    others = {key: run for key, run in held.get("runs", {}).items() if run["policy"] not in ours}
    return {**held, "runs": others}


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
        section = document[name] = {**kept(document.get(name, {}), here), **here}
        if name in ("decisions", "bounds"):
            section["results"] = (
                measure_decisions(tiny=args.tiny) if name == "decisions" else measure_bounds(args.data)
            )
            print(json.dumps(section["results"], indent=1), flush=True)
        else:
            make_section(name, section, size, save)
        save()


if __name__ == "__main__":
    main()
