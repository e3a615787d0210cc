"""How far the twin is from our own engine: the same workloads on both, from idle to overload.

    python -m benchmarks.twin_engine --device cpu|cuda [--profile FILE] [--rounds N] [--out FILE]

In each round the machine is profiled, unless a profile is given. Then an engine with random weights replays
five workloads in real time, other ones in every round, and the twin runs them on the profile: of the engine
it knows its limits and the sizes of its adapters, nothing of what it did. A CPU is used by others as well,
and its pace changes: there the replay stands still now and then while another engine, which serves requests
of its own, takes a few steps, and the twin is told how much longer these took than the profile says. Writes
results/twin_engine_cpu.json or twin_engine_cuda.json.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.engine_scenarios import bring_in, new_request, run_dry
from loraplex.bench.engine_scenarios import replay as replay_live
from loraplex.bench.environment import ENGINE_PACKAGES, environment
from loraplex.bench.profile_scenarios import ProfileOptions, profile_machine
from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine, random_specs, register
from loraplex.bench.records import RequestRecord
from loraplex.engine.core import Engine
from loraplex.model.shapes import config_of_shape
from loraplex.perf.cost_model import CostModel
from loraplex.perf.profile_json import profile_to_json, read_profile
from loraplex.scheduling.decode_group import DecodeGroup
from loraplex.scheduling.plan import Chunk, StepPlan
from loraplex.scheduling.step_features import step_features
from loraplex.scheduling.work import StepWork
from loraplex.twin.outcome import Outcome
from loraplex.twin.replay import OwnEngines, ReplayOptions, longest_of
from loraplex.twin.scores import smape
from loraplex.twin.times import CostModelTimes, Repeats
from loraplex.workload.jsonl import WorkloadRequest

RESULTS: Final = Path(__file__).parent / "results"
LOADS: Final = (0.05, 0.4, 0.7, 0.95, 1.3)
"""Of what the engine can serve, as the twin has it at the machine's pace."""
RANKS: Final = (8, 16, 32, 64)
MAX_STEP_TOKENS: Final = 2048
BLOCK_SIZE: Final = 16
_WARM_UP_S: Final = 4.0
_LARGEST_SIZE: Final = 500
_LOOK_EVERY_S: Final = 0.25
_SETTLE_STEPS: Final = 3
_LOOK_STEPS: Final = 12
_FIRST_LOOKS: Final = 25
_NEIGHBOURS: Final = 2
"""Looks before and after a moment by which its pace is told."""
_LOOKED_AT: Final = (2, 6, 12, 24, 48)
"""Requests that decode, one number at a time."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`median_tokens`: of prompts and of outputs, which are spread log-normally. `duration_s`: of the
    arrivals."""

    device: str
    shape: str
    dtype: torch.dtype
    num_adapters: int
    median_tokens: int
    max_tokens: int
    duration_s: float


SETTINGS: Final = {
    "cuda": Setting(
        device="cuda",
        shape="llama-2-7b",
        dtype=torch.bfloat16,
        num_adapters=64,
        median_tokens=120,
        max_tokens=1000,
        duration_s=25.0,
    ),
    "cpu": Setting(
        device="cpu",
        shape="tiny",
        dtype=torch.float32,
        num_adapters=16,
        median_tokens=30,
        max_tokens=120,
        duration_s=20.0,
    ),
}


def new_profile(setting: Setting) -> CostModel:
    options = ProfileOptions(
        config=config_of_shape(setting.shape), device=setting.device, dtype=setting.dtype
    )
    return profile_machine(options, lambda phase, share: None)


def measure(setting: Setting, profiles: Sequence[CostModel]) -> list[dict[str, Any]]:
    """A round on each."""
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
    """Each workload on both."""
    vocab_size = vocab_size_of(setting)
    on_cpu = setting.device == "cpu"
    capacity = served_per_s(engine, setting, profile)
    warm_up(engine, setting, capacity)
    for number, load in enumerate(LOADS):
        versions = register(engine, specs_of(f"round{round_number}-load{number}", setting))
        engine.warm_up()
        if on_cpu:  # made up, not read: what that takes is nobody's profile
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


class Pace:
    """How much longer than the profile says steps of serving take, on an engine of their own, by the clock of
    a replay: it begins with the first step there. Requests come and go as in the workloads, a few at times
    and many at others. `at_first`: before it."""

    def __init__(self, setting: Setting, profile: CostModel) -> None:
        self._profile = profile
        self._engine = build_random_engine(
            RandomEngineOptions(
                shape=setting.shape, device=setting.device, dtype=setting.dtype, compiled=True
            )
        )
        self._vocab_size = vocab_size_of(setting)
        specs = specs_of("pace", setting)
        self._bytes = {spec.version: spec.num_params * setting.dtype.itemsize for spec in specs}
        self._versions = register(self._engine, specs)
        see_sizes(self._engine, self._versions, self._vocab_size)
        self._coming = enumerate(requests(replace(setting, duration_s=inf), 1.0, seed=97))
        self._running: list[str] = []
        self._num_looks = 0
        for _ in _LOOKED_AT:  # what is done at first use only
            self._take_steps()
        self.at_first = fmean(self._take_steps() for _ in range(_FIRST_LOOKS))
        self._began_s: float | None = None
        self._seen_s = 0.0
        self._at_s: list[float] = []
        self._ratios: list[float] = []

    def close(self) -> None:
        self._engine.close()

    def figures(self) -> dict[str, list[float]]:
        """Every look."""
        return {"at_s": self._at_s, "times_the_profile": self._ratios}

    def at(self, moment_s: float) -> float:
        """By the looks before and after it."""
        place = bisect_left(self._at_s, moment_s)
        return fmean(self._ratios[max(place - _NEIGHBOURS, 0) : place + _NEIGHBOURS + 1])

    def look(self) -> float:
        """Unless the last time was just now; the seconds that it took."""
        started_s = time.perf_counter()
        if started_s - self._seen_s < _LOOK_EVERY_S:
            return 0.0
        if self._began_s is None:
            self._began_s = started_s
        self._at_s.append(started_s - self._began_s)
        self._ratios.append(self._take_steps())
        self._seen_s = time.perf_counter()
        self._began_s += self._seen_s - started_s
        return self._seen_s - started_s

    def _take_steps(self) -> float:
        """With another number of requests every time; measured over predicted."""
        level = _LOOKED_AT[self._num_looks % len(_LOOKED_AT)]
        self._num_looks += 1
        while len(self._running) > level:
            self._engine.cancel(self._running.pop())
        took_s = predicted_s = 0.0
        for number in range(_SETTLE_STEPS + _LOOK_STEPS):
            begun_s = time.perf_counter()
            while len(self._running) < level:
                self._add()
            for output in self._engine.step():
                if output.finish_reason is not None:
                    self._running.remove(output.request_id)
            if number >= _SETTLE_STEPS:  # the first find nothing of theirs in the caches
                took_s += time.perf_counter() - begun_s
                assert self._engine.landed is not None
                features = step_features(self._engine.landed.chunks, self._bytes.__getitem__)
                predicted_s += self._profile.step_s(features)
        return took_s / predicted_s

    def _add(self) -> None:
        number, request = next(self._coming)
        version = self._versions[request.adapter]
        new = new_request(
            str(number),
            request.prompt_tokens,
            request.output_tokens,
            version,
            vocab_size=self._vocab_size,
            seed=number,
        )
        self._engine.add_request(new)
        self._running.append(new.request_id)


class PacedTimes(CostModelTimes):
    """The profile's, on a machine that is `slower` just now."""

    slower = 1.0

    def step_s(self, plan: StepPlan, num_waiting: int) -> float:
        return super().step_s(plan, num_waiting) * self.slower

    def repeats(self, group: DecodeGroup, num_waiting: int) -> Repeats:
        found = super().repeats(group, num_waiting)
        return Repeats(found.first_s * self.slower, found.growth_s * self.slower)

    def beside_s(self, group: DecodeGroup, chunks: Sequence[Chunk]) -> float:
        return super().beside_s(group, chunks) * self.slower


def warm_up(engine: Engine, setting: Setting, capacity: float) -> None:
    """What is compiled, captured or allocated at first use is no matter of the twin's."""
    versions = register(engine, specs_of("warm", setting))
    if setting.device == "cpu":
        see_sizes(engine, versions, vocab_size_of(setting))
    brief = replace(setting, duration_s=_WARM_UP_S)
    replay_live(engine, list(requests(brief, capacity, seed=98)), versions, vocab_size_of(setting))
    for version in versions:
        engine.remove_adapter(version)
    engine.take_removed_adapters()


def see_sizes(engine: Engine, versions: Sequence[str], vocab_size: int) -> None:
    """The products of a CPU are compiled for every number of rows, when it first comes."""
    for num_rows in range(2, _LARGEST_SIZE):
        version = versions[num_rows % len(versions)]
        engine.add_request(
            new_request(f"size-{num_rows}", num_rows, 1, version, vocab_size=vocab_size, seed=num_rows)
        )
        run_dry(engine)


def served_per_s(engine: Engine, setting: Setting, profile: CostModel) -> float:
    """Requests per second at the most, by the twin: of many more than can be served."""
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
    """With the engine's limits; adapters are where `compare` has them when time begins. `pace`: of the
    machine while the engine had this workload."""
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
        simulator.advance(simulator.now_s + _LOOK_EVERY_S)
    return simulator.recorder.outcome(simulator.now_s)


def specs_of(name: str, setting: Setting) -> list[AdapterSpec]:
    return random_specs(name, setting.shape, num_adapters=setting.num_adapters, ranks=RANKS, modules="q,k,v")


def vocab_size_of(setting: Setting) -> int:
    return config_of_shape(setting.shape).shape.vocab_size


def requests(setting: Setting, per_s: float, seed: int) -> Iterator[WorkloadRequest]:
    """Poisson arrivals, every adapter as likely as any other."""
    rng, now_s = random.Random(seed), 0.0

    def length() -> int:
        drawn = setting.median_tokens * rng.lognormvariate(0.0, 0.7)
        return min(max(round(drawn), 2), setting.max_tokens)

    while (now_s := now_s + rng.expovariate(per_s)) < setting.duration_s:
        yield WorkloadRequest(
            arrival_s=now_s,
            prompt_tokens=length(),
            output_tokens=length(),
            adapter=rng.randrange(setting.num_adapters),
        )


def figures_of_twin(outcome: Outcome) -> dict[str, float]:
    summary = outcome.summary()
    assert summary["num_served"] == summary["num_requests"]
    return {
        "output_tok_s": summary["output_tok_s"],
        "itl_ms": summary["itl_mean_s"] * 1e3,
        "ttft_ms": summary["ttft_s"]["mean"] * 1e3,
    }


def figures_of_live(records: Sequence[RequestRecord]) -> dict[str, float]:
    """The same, of what was measured."""
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
    setting = SETTINGS[chosen.device]
    if chosen.seconds is not None:
        setting = replace(setting, duration_s=chosen.seconds)
    if setting.device == "cpu":
        torch.set_num_threads(1)
    given = None if chosen.profile is None else read_profile(chosen.profile)
    rounds = measure(setting, [given or new_profile(setting) for _ in range(chosen.rounds)])
    workloads = [each for found in rounds for each in found["workloads"]]
    means = {"mean_smape": mean_smape(each["smape"] for each in workloads)}
    if setting.device == "cpu":
        untold = (each["not_told_the_pace"]["smape"] for each in workloads)
        means["mean_smape_not_told_the_pace"] = mean_smape(untold)
    print(means)
    out = chosen.out or RESULTS / f"twin_engine_{setting.device}.json"
    described = {**asdict(setting), "dtype": str(setting.dtype).removeprefix("torch.")}
    document = {**environment(ENGINE_PACKAGES), "setting": described, "rounds": rounds, **means}
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
