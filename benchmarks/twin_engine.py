"""Measure the twin's errors on our own engine: the same workloads on both, from idle to overload.

    python -m benchmarks.twin_engine --device cpu|cuda [--profile FILE] [--rounds N] [--out FILE]

The machine is profiled, a GPU once and a CPU before every round, unless a profile is given. In a round, an
engine with random weights replays five new workloads in real time, and the twin runs them on the profile: it
knows the engine's limits and the sizes of its adapters, but nothing of the run. A CPU is shared, and its
speed changes: there the replay pauses now and then while another engine, with its own requests, takes a few
steps, and the twin is given the ratio of their measured to predicted time. Writes
results/twin_engine_cpu.json or twin_engine_cuda.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

from benchmarks import sources
from benchmarks.pace import LOOK_EVERY_S, Pace, PacedTimes
from benchmarks.twin_loads import RANKS, SETTINGS, Setting, requests, see_sizes, specs_of, vocab_size_of
from loraplex.bench.engine_scenarios import bring_in
from loraplex.bench.engine_scenarios import replay as replay_live
from loraplex.bench.environment import ENGINE_PACKAGES, environment
from loraplex.bench.profile_scenarios import ProfileOptions, profile_machine
from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine, register
from loraplex.bench.records import RequestRecord
from loraplex.engine.core import Engine
from loraplex.model.shapes import config_of_shape
from loraplex.perf.cost_model import CostModel
from loraplex.perf.profile_json import profile_to_json, read_profile
from loraplex.scheduling.work import StepWork
from loraplex.twin.outcome import Outcome
from loraplex.twin.replay import OwnEngines, ReplayOptions, longest_of
from loraplex.twin.scores import smape
from loraplex.workload.jsonl import WorkloadRequest

RESULTS: Final = Path(__file__).parent / "results"
LOADS: Final = (0.05, 0.4, 0.7, 0.95, 1.3)
"""Loads relative to the engine's capacity, as the twin predicts it at the machine's pace."""
MAX_STEP_TOKENS: Final = 2048
BLOCK_SIZE: Final = 16
_WARM_UP_S: Final = 4.0


def new_profile(setting: Setting) -> CostModel:
    options = ProfileOptions(
        config=config_of_shape(setting.shape), device=setting.device, dtype=setting.dtype
    )
    return profile_machine(options, lambda phase, share: None)


def measure(setting: Setting, profiles: Iterable[CostModel]) -> list[dict[str, Any]]:
    """Run a round on each profile."""
    engine = build_random_engine(
        RandomEngineOptions(
            shape=setting.shape,
            device=setting.device,
            dtype=setting.dtype,
            max_step_tokens=MAX_STEP_TOKENS,
            compiled=True,
        )
    )
    try:
        return [
            {
                "profile": json.loads(profile_to_json(profile)),
                "workloads": list(compare(engine, setting, profile, number)),
            }
            for number, profile in enumerate(profiles)
        ]
    finally:
        engine.close()


def compare(
    engine: Engine, setting: Setting, profile: CostModel, round_number: int
) -> Iterator[dict[str, Any]]:
    """Run each workload on both, and yield the comparison."""
    vocab_size = vocab_size_of(setting)
    on_cpu = setting.device == "cpu"
    capacity = served_per_s(engine, setting, profile)
    warm_up(engine, setting, capacity)
    for number, load in enumerate(LOADS):
        versions = register(engine, specs_of(f"round{round_number}-load{number}", setting))
        engine.warm_up()
        if on_cpu:  # weights are generated, not read, and no profile covers that
            bring_in(engine, versions, vocab_size)
        pace = Pace(setting, profile) if on_cpu else None
        per_s = load * (capacity if pace is None else capacity / pace.at_first)
        workload = list(requests(setting, per_s, seed=round_number * len(LOADS) + number))
        pause = (lambda: 0.0) if pace is None else pace.look
        live = figures_of_live(replay_live(engine, workload, versions, vocab_size, pause))
        twin = figures_of_twin(run_twin(engine, setting, profile, workload, pace))
        errors = {key: smape([(twin[key], live[key])]) for key in live}
        told: dict[str, Any] = {} if pace is None else {"pace": pace.figures()}
        if pace is not None:
            pace.close()
            untold = figures_of_twin(run_twin(engine, setting, profile, workload))
            told["not_told_the_pace"] = {
                "twin": untold,
                "smape": {key: smape([(untold[key], live[key])]) for key in live},
            }
        print(f"{load:.2f}: {len(workload)} requests, live {live}, twin {twin}, SMAPE {errors}", flush=True)
        yield {
            "load": load,
            "requests_per_s": per_s,
            "num_requests": len(workload),
            "live": live,
            "twin": twin,
            "smape": errors,
            **told,
        }
        for version in versions:
            engine.remove_adapter(version)
        engine.take_removed_adapters()


def warm_up(engine: Engine, setting: Setting, capacity: float) -> None:
    """Warm up: the twin does not model what is compiled, captured or allocated at first use."""
    versions = register(engine, specs_of("warm", setting))
    if setting.device == "cpu":
        see_sizes(engine, versions, vocab_size_of(setting))
    brief = replace(setting, duration_s=_WARM_UP_S)
    replay_live(engine, list(requests(brief, capacity, seed=98)), versions, vocab_size_of(setting))
    for version in versions:
        engine.remove_adapter(version)
    engine.take_removed_adapters()


def served_per_s(engine: Engine, setting: Setting, profile: CostModel) -> float:
    """Return the twin's capacity in requests per second, from many more than can be served."""
    flood = list(requests(setting, 2000 / setting.duration_s, seed=99))
    outcome = run_twin(engine, setting, profile, [replace(each, arrival_s=0.0) for each in flood])
    return len(flood) / outcome.duration_s


def run_twin(
    engine: Engine,
    setting: Setting,
    profile: CostModel,
    workload: Sequence[WorkloadRequest],
    pace: Pace | None = None,
) -> Outcome:
    """Run the twin with the engine's limits; at the start, adapters are where `compare` has put them. `pace`:
    of the machine while the engine ran this workload."""
    on_gpu, shape, stats = setting.device == "cuda", config_of_shape(setting.shape).shape, engine.stats()
    engines = OwnEngines(
        profile,
        ReplayOptions(
            num_adapters=setting.num_adapters,
            ranks=RANKS,
            kv_tokens=stats.num_kv_blocks * BLOCK_SIZE,
            host_memory=stats.host_adapter_budget_bytes,
            work=StepWork(
                max_tokens=MAX_STEP_TOKENS,
                position_cost=shape.attention_flops / shape.linear_flops if on_gpu else 0.0,
            ),
        ),
        longest=longest_of(workload),
    )
    times = PacedTimes(profile, engines.adapter_bytes)
    simulator = engines.make(times)
    for number in range(setting.num_adapters):
        engines.register(simulator, number)
    if on_gpu:
        simulator.stage_all()
    else:
        simulator.bring_in_all()
    if pace is None:
        return simulator.run(workload)
    for request in workload:
        times.slower = pace.at(simulator.now_s)
        simulator.advance(request.arrival_s)
        simulator.offer(request)
    while not simulator.is_idle():
        times.slower = pace.at(simulator.now_s)
        simulator.advance(simulator.now_s + LOOK_EVERY_S)
    return simulator.outcome(simulator.now_s)


def figures_of_twin(outcome: Outcome) -> dict[str, float]:
    summary = outcome.summary()
    assert summary["num_served"] == summary["num_requests"]
    return {
        "output_tok_s": summary["output_tok_s"],
        "itl_ms": summary["itl_mean_s"] * 1e3,
        "ttft_ms": summary["ttft_s"]["mean"] * 1e3,
    }


def figures_of_live(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return the same figures of the measured run."""
    assert all(record.ok for record in records)
    num_tokens = sum(record.output_tokens for record in records)
    firsts_s = [record.token_times_s[0] for record in records]
    decoded_s = sum(record.finish_s - first_s for record, first_s in zip(records, firsts_s, strict=True))
    waited_s = sum(first_s - record.arrival_s for record, first_s in zip(records, firsts_s, strict=True))
    return {
        "output_tok_s": num_tokens / max(record.finish_s for record in records),
        "itl_ms": decoded_s / (num_tokens - len(records)) * 1e3,
        "ttft_ms": waited_s / len(records) * 1e3,
    }


def mean_smape(of_each: Iterable[dict[str, float]]) -> dict[str, float]:
    found = list(of_each)
    return {name: fmean(each[name] for each in found) for name in ("output_tok_s", "itl_ms", "ttft_ms")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=sorted(SETTINGS), default="cpu")
    parser.add_argument("--profile", type=Path, help="of this machine and shape, instead of new ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="of arrivals, for a trial")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.rounds < 1:
        parser.error("--rounds: one at the least")
    setting = SETTINGS[chosen.device]
    if chosen.seconds is not None:
        setting = replace(setting, duration_s=chosen.seconds)
    if setting.device == "cpu":
        torch.set_num_threads(1)
    given = None if chosen.profile is None else read_profile(chosen.profile)
    profiles: Iterable[CostModel]
    if given is not None or setting.device == "cuda":  # a GPU's speed is steady
        profiles = [given or new_profile(setting)] * chosen.rounds
    else:
        profiles = (new_profile(setting) for _ in range(chosen.rounds))
    rounds = measure(setting, profiles)
    workloads = [each for found in rounds for each in found["workloads"]]
    means = {"mean_smape": mean_smape(each["smape"] for each in workloads)}
    if setting.device == "cpu":
        untold = (each["not_told_the_pace"]["smape"] for each in workloads)
        means["mean_smape_not_told_the_pace"] = mean_smape(untold)
    print(means)
    out = chosen.out or RESULTS / f"twin_engine_{setting.device}.json"
    described = {**asdict(setting), "dtype": str(setting.dtype).removeprefix("torch.")}
    code = {"sources": sources.fingerprints(f"twin_engine_{setting.device}.json")}
    document = {**environment(ENGINE_PACKAGES), **code, "setting": described, "rounds": rounds, **means}
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
