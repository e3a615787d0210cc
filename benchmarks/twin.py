"""Measure the twin's errors on recorded runs of another engine, and its speed.

    python -m benchmarks.twin speed fleet                                        # on a quiet machine
    python -m benchmarks.twin authors held_out --runs RUNS --fit OTHERS          # a quarter of an hour
    python -m benchmarks.twin halves --runs RUNS --fit OTHERS                    # an hour

Sections:  speed     one engine for an hour of virtual time
           fleet     60 engines for five minutes
           authors   the twin of the authors of the runs, by its predictions in RUNS
           held_out  ours: RUNS predicted from OTHERS, without any of RUNS
           halves    OTHERS themselves, each half of their workloads predicted from the other half

Sections that are not named keep their results in results/twin_validation.json. It holds scores only, no
recorded figures.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import resource
import sys
import time
import zlib
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from benchmarks import sources
from loraplex.bench.environment import environment
from loraplex.core.modules import MODULES
from loraplex.core.whole_file import write_whole
from loraplex.fleet.policy import Policy
from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.cost_model import CostModel
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.layer_pipeline import Bus
from loraplex.perf.line import Line
from loraplex.perf.step_cost import RowCurve, StepCost, StepTerms
from loraplex.perf.subject import Subject
from loraplex.twin.fleet_run import FleetOptions, FleetRuns
from loraplex.twin.recorded_runs import Measured, RunSetup, RunsFile, read_runs
from loraplex.twin.replay import ReplayOptions, replay
from loraplex.twin.scores import smape
from loraplex.twin.slo import Slo
from loraplex.twin.validate import Prediction, fit_for, predict, report
from loraplex.workload.jsonl import WorkloadRequest
from loraplex.workload.text_files import read_lines

CURVE: Final = RowCurve(rows=(1, 32, 64, 128, 2048), seconds_at=(4.6e-3, 5.9e-3, 7.6e-3, 9e-3, 60e-3))
GPU: Final = CostModel(
    subject=Subject(machine="imagined", device="cuda", model="7b", dtype="bfloat16", num_layers=32),
    measured=False,
    bus=Bus(copy=Line(latency_s=10e-6, unit_s=1 / 50e9), launch_s=3e-6),
    read=Line(latency_s=1e-3, unit_s=1 / 5e9),
    disk=Line(latency_s=1e-3, unit_s=1 / 2e9),
    step=StepCost(
        decodes=CURVE,
        prompts=CURVE,
        terms=StepTerms(lora_s=2e-3, decode_position_s=10e-9, prompt_pair_s=0.1e-9, adapter_byte_s=1 / 4e12),
    ),
    assist=AssistCost(round_trip_s=0.0, token_s=0.0, call_s=0.0, weight_s=0.0, row_s=0.0),
    memory=EngineMemory(
        max_context=1 << 17,
        token_bytes=512 << 10,
        block_tokens=16,
        arena_bytes=200_000 * (512 << 10),
        kv_tokens=None,
        host_bytes=64 << 30,
        table_bytes=0,
        rank_bytes=dict.fromkeys(MODULES, 512 << 10),
    ),
)
"""Approximate costs of a 7B model on a large GPU; the twin's speed depends little on them."""
RESULTS: Final = Path(__file__).parent / "results"
FILE: Final = "twin_validation.json"
SECTIONS: Final = ("speed", "fleet", "authors", "held_out", "halves")
_FROM_RUNS: Final = ("authors", "held_out", "halves")
HOUR_S = 3600.0
FLEET_ROUTING: Final = "rank-aware"
FLEET_ENGINES, FLEET_ADAPTERS, FLEET_RPS, FLEET_S, SKEW = 60, 40_000, 340.0, 300.0, 0.9


def scores(predictions: Sequence[Prediction], measured: dict[str, Measured]) -> dict[str, Any]:
    """Return the scores of all runs, by model, and of starved and other runs separately."""
    found = report(predictions, measured)
    by_model = {
        model: _brief(report([each for each in predictions if each.setup.model == model], measured))
        for model in sorted({each.setup.model for each in predictions})
    }
    by_load = {
        name: _brief(report(chosen, measured))
        for name, wanted in (("starved", True), ("served", False))
        if (chosen := [each for each in predictions if _is_starved(each, measured) is wanted])
    }
    return {**_brief(found), "by_model": by_model, "by_load": by_load}


def _is_starved(each: Prediction, measured: dict[str, Measured]) -> bool | None:
    found = measured.get(each.setup.key)
    return None if found is None or each.predicted is None else found.total_tok_s < 0.9 * each.offered_tok_s


def _brief(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("smape", "starvation_f1", "num_compared", "num_starved")}


def held_out(runs: RunsFile, fit: RunsFile, say: Callable[[str, float], None]) -> dict[str, Any]:
    """Predict the given runs from all others."""
    start_s = time.perf_counter()
    fitted = fit_for(runs.setups, [fit], progress=say)
    fit_s = time.perf_counter() - start_s
    found = scores(predict(fitted, runs.setups), dict(runs.measured))
    quality = {model: dict(profile.quality) for model, profile in fitted.profiles.items()}
    return {**found, "fit_s": fit_s, "predict_s": time.perf_counter() - start_s - fit_s, "quality": quality}


def halves(runs: RunsFile, models: Sequence[str], say: Callable[[str, float], None]) -> dict[str, Any]:
    """Predict each half of the workloads (by their rates) from the other: not even the requests were seen."""
    predictions: list[Prediction] = []
    for half in (0, 1):
        asked = [s for s in runs.setups if s.model in models and s.key in runs.measured and _half(s) == half]
        predictions += predict(fit_for(asked, [runs], progress=say), asked)
    return scores(predictions, dict(runs.measured))


def _half(setup: RunSetup) -> int:
    return zlib.crc32(repr(setup.rates).encode()) % 2


def authors(path: Path, runs: RunsFile) -> dict[str, Any]:
    """Score the twin of the authors of the runs, by its predictions in the same file, over the runs that were
    recorded in full and say how many requests were sent."""
    rows = {row["key"]: row for row in csv.DictReader(line for _, line in read_lines(path))}
    pairs = [
        (rows[key], found)
        for key, found in runs.measured.items()
        if key in rows and found.ttft_all_s is not None
    ]
    columns: dict[str, tuple[str, Callable[[Measured], float]]] = {
        "output_throughput": ("dt_output_throughput", lambda found: found.output_tok_s),
        "total_throughput": ("dt_total_throughput", lambda found: found.total_tok_s),
        "itl": ("dt_itl", lambda found: found.itl_s * 1e3),
        # Their TTFT counts requests that did not complete: it predicts this figure, not our `ttft`.
        "ttft_all": ("dt_ttft", lambda found: (found.ttft_all_s or 0.0) * 1e3),
    }

    def score(of: Sequence[tuple[dict[str, str], Measured]]) -> dict[str, Any]:
        errors = {
            name: smape([(float(row[column]), measured(found)) for row, found in of])
            for name, (column, measured) in columns.items()
        }
        return {"smape": errors, "num_compared": len(of)}

    models = sorted({row["model"] for row, _ in pairs})
    by_model = {model: score([pair for pair in pairs if pair[0]["model"] == model]) for model in models}
    return {**score(pairs), "by_model": by_model}


def speed() -> dict[str, Any]:
    """Simulate one hour of one GPU: 10 requests a second on 128 adapters, with our own scheduler."""
    workload = list(_poisson(10.0, HOUR_S, _uniform(128)))
    options = ReplayOptions(num_adapters=128, adapter_bytes=25 << 20)
    took_s = []
    for _ in range(3):
        start_s = time.process_time()
        outcome = replay(GPU, workload, options)
        took_s.append(time.process_time() - start_s)
    summary = outcome.summary()
    return {
        "num_requests": len(workload),
        "num_steps": summary["num_steps"],
        "mean_running": summary["mean_running"],
        "cpu_s": min(took_s),
        "times_real_time": HOUR_S / min(took_s),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def fleet() -> dict[str, Any]:
    """Simulate five minutes of 60 GPUs: 340 requests a second on 40,000 adapters of ranks 8 to 64, behind a
    router that considers the load of every replica for every request. No adapter is in any host's memory at
    first."""
    workload = list(_poisson(FLEET_RPS, FLEET_S, _skewed(FLEET_ADAPTERS)))
    options = ReplayOptions(num_adapters=FLEET_ADAPTERS, ranks=(8, 16, 32, 64), rank_bytes=(25 << 20) // 16)
    chosen = FleetOptions(num_replicas=FLEET_ENGINES, replay=options, slo=Slo(tpt_s=0.01))
    runs = FleetRuns(GPU, workload, chosen)
    took_s = []
    for _ in range(3):
        start_s = time.process_time()
        outcome = runs.run(Policy(routing=FLEET_ROUTING))
        took_s.append(time.process_time() - start_s)
    summary = outcome.all.summary()
    return {
        "num_engines": FLEET_ENGINES,
        "num_adapters": FLEET_ADAPTERS,
        "num_adapters_used": len({request.adapter for request in workload}),
        "routing": FLEET_ROUTING,
        "num_requests": len(workload),
        "num_served": summary["num_served"],
        "num_loads": summary["num_loads"],
        "num_steps": summary["num_steps"],
        "mean_running": summary["mean_running"],
        "most_running": max(each.mean_running for each in outcome.replicas),
        "cpu_s": min(took_s),
        "times_real_time": FLEET_S / min(took_s),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _uniform(num_adapters: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randrange(num_adapters)


def _skewed(num_adapters: int) -> Callable[[random.Random], int]:
    """Draw adapters with probability proportional to n^-0.9 for the adapter at place n; places are
    shuffled."""
    reached = list(accumulate((place + 1) ** -SKEW for place in range(num_adapters)))
    places = random.Random(1).sample(range(num_adapters), num_adapters)
    return lambda rng: places[bisect(reached, rng.random() * reached[-1], hi=num_adapters - 1)]


def _poisson(
    rps: float, duration_s: float, adapter_of: Callable[[random.Random], int]
) -> Iterator[WorkloadRequest]:
    """Yield Poisson arrivals with prompts and outputs of about 225 and 195 tokens."""
    rng, now_s = random.Random(0), 0.0
    while (now_s := now_s + rng.expovariate(rps)) < duration_s:
        yield WorkloadRequest(
            arrival_s=now_s,
            prompt_tokens=max(1, round(rng.gammavariate(1.2, 188))),
            output_tokens=max(1, round(rng.gammavariate(1.8, 108))),
            adapter=adapter_of(rng),
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--runs", type=Path, help="recorded runs to predict")
    parser.add_argument("--fit", type=Path, help="recorded runs to learn from")
    parser.add_argument("--out", type=Path, default=RESULTS / FILE)
    args = parser.parse_args(argv)
    if set(args.sections) & set(_FROM_RUNS) and not (args.runs and args.fit):
        parser.error(f"{', '.join(_FROM_RUNS)} need --runs and --fit")
    document: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    # Speed first: its peak memory must not include that of other sections.
    for name in sorted(args.sections, key=SECTIONS.index):
        # Taken first: the code may be edited while this runs.
        here = {**environment(("loraplex", "numpy", "numba")), "sources": sources.fingerprints(FILE, name)}
        document[name] = {**here, **_measure(name, args.runs, args.fit)}
        write_whole(args.out, json.dumps(document, indent=1) + "\n")


def _measure(name: str, runs_file: Path, fit_file: Path) -> dict[str, Any]:
    if name not in _FROM_RUNS:
        return speed() if name == "speed" else fleet()

    def say(text: str, done: float) -> None:
        print(f"{text}, {done:.0%}", file=sys.stderr, flush=True)

    runs = read_runs(runs_file)
    if name == "authors":
        return authors(runs_file, runs)
    fit = read_runs(fit_file)
    if name == "held_out":
        return held_out(runs, fit, say)
    return halves(fit, sorted({setup.model for setup in runs.setups}), say)


if __name__ == "__main__":
    main()
