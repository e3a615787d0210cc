"""Compare the same policy in the twin and live: adapter loads, replicas' shares of requests, TTFT.

    python -m benchmarks.fleet_live               # about half an hour on a quiet machine

One engine is profiled with one thread. Then a fleet of three such replicas serves a workload in real time,
and the twin simulates the same workload on the profile, under the same policy. Each replica has memory for a
third of the adapters. The load leaves the two cores of a small machine idle part of the time, as a profile
does not model engines that wait for a core. A shared machine's speed varies from minute to minute: the twin's
steps are scaled by one factor, such that the mean gap between tokens equals the fleet's. The first part of a
workload fills the replicas' memory and does not count. `--tiny` tests the script itself in a minute, with
guessed costs, and writes nothing without --out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from benchmarks.cpu_serve import checkpoint
from benchmarks.make_checkpoint import (
    MAX_POSITIONS,
    SERVED,
    TARGETS,
    VOCAB_SIZE,
    Checkpoint,
    adapter_name,
)
from benchmarks.servers import RunningServer, ServerCommand, running
from benchmarks.sources import fingerprints
from loraplex.bench.client import CompletionClient
from loraplex.bench.environment import environment
from loraplex.bench.load import open_loop, run
from loraplex.bench.prompts import PromptSource, workload_requests
from loraplex.bench.records import RequestRecord
from loraplex.core.whole_file import write_whole
from loraplex.fleet.policy import Policy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.profile_json import read_profile
from loraplex.twin.fleet_run import FleetOptions, FleetRuns
from loraplex.twin.replay import ReplayOptions
from loraplex.workload.jsonl import WorkloadRequest

FILE: Final = "fleet_live.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE
POLICIES: Final = ("auto", "affinity+everywhere", "round-robin+everywhere")
NUM_REPLICAS: Final = 3
NUM_ADAPTERS: Final = 24
HOST_MIB: Final = 28
"""Memory of each replica for adapters, which take about 82 MiB in total."""
KV_MIB: Final = 256
_ROUNDS: Final = 3
"""Number of simulations to make the gaps equal."""
_LOADS: Final = re.compile(r'^loraplex:replica_adapter_loads_total\{replica="(\d+)"\} (\d+)', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Requests at random times (Poisson), for adapters by Zipf's law. Those before `counted_from_s` are
    served, but not counted."""

    requests_per_s: float = 1.8
    counted_from_s: float = 60.0
    duration_s: float = 240.0
    prompt_tokens: tuple[int, int] = (96, 320)
    output_tokens: tuple[int, int] = (8, 24)
    skew: float = 0.9

    def workload(self, seed: int) -> list[WorkloadRequest]:
        rng = np.random.default_rng(seed)
        popularity = 1.0 / np.arange(1, NUM_ADAPTERS + 1) ** self.skew
        popularity = rng.permutation(popularity / popularity.sum())
        found, at_s = [], 0.0
        while (at_s := at_s + rng.exponential(1 / self.requests_per_s)) < self.duration_s:
            found.append(
                WorkloadRequest(
                    arrival_s=at_s,
                    prompt_tokens=int(rng.integers(*self.prompt_tokens)),
                    output_tokens=int(rng.integers(*self.output_tokens)),
                    adapter=int(rng.choice(NUM_ADAPTERS, p=popularity)),
                )
            )
        return found


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures that are compared, and the gap between tokens, by which the twin's steps are scaled.
    `shares`: share of the requests by replica."""

    adapter_loads: int
    shares: Sequence[float]
    ttft_mean_s: float
    gap_mean_s: float

    def document(self) -> dict[str, Any]:
        return {
            "adapter_loads": self.adapter_loads,
            "shares": [round(share, 4) for share in self.shares],
            "ttft_mean_ms": round(1e3 * self.ttft_mean_s, 2),
            "gap_mean_ms": round(1e3 * self.gap_mean_s, 2),
        }


def differences(live: Figures, twin: Figures) -> dict[str, float]:
    """Return the twin's differences from the fleet: relative ones of loads and times, and the largest
    absolute one of shares."""
    return {
        "adapter_loads": round(twin.adapter_loads / live.adapter_loads - 1, 4),
        "share": round(max(abs(a - b) for a, b in zip(live.shares, twin.shares, strict=True)), 4),
        "ttft_mean": round(twin.ttft_mean_s / live.ttft_mean_s - 1, 4),
    }


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of a run. `env` sets a separate home folder, where engines find the profile."""

    served: Checkpoint
    scratch: Path
    traffic: Traffic
    env: dict[str, str]

    @property
    def program(self) -> str:
        return str(Path(sys.executable).with_name("loraplex"))

    @property
    def profiles(self) -> Path:
        """The folder where engines look for profiles."""
        return self.scratch / "home" / ".cache" / "loraplex" / "profiles"

    def given(self, path: Path) -> CostModel:
        """Use a profile that was measured earlier."""
        self.profiles.mkdir(parents=True)
        shutil.copy(path, self.profiles)
        return read_profile(path)

    def measured(self, repeats: int) -> CostModel:
        """Measure the costs of an engine with one thread."""
        command = (self.program, "profile", "--model", str(self.served.base), "--device", "cpu")
        options = ("--dtype", "float32", "--threads", "1", "--repeats", str(repeats))
        subprocess.run([*command, *options], env={**os.environ, **self.env}, check=True, stdout=2)
        (path,) = self.profiles.glob("*.json")
        return read_profile(path)

    def fleet(self, policy: Policy, name: str) -> ServerCommand:
        return ServerCommand(
            args=(
                *(self.program, "fleet", "serve", "--model", str(self.served.base)),
                *("--served-model-name", "base", "--adapters", str(self.served.adapters)),
                *("--replicas", str(NUM_REPLICAS), "--routing", policy.routing),
                *("--placement", policy.placement),
                *("--dtype", "float32", "--threads", "1", "--host-adapter-memory", f"{HOST_MIB}MiB"),
                *("--kv-memory", f"{KV_MIB}MiB", "--no-shadow-twin"),
                *("--port", "{port}", "--state-dir", str(self.scratch / name)),
            ),
            env=self.env,
        )


def guessed(setting: Setting) -> CostModel:
    """Return the cost model of an engine without a profile."""
    import torch

    from loraplex.engine.profile_subject import known_costs
    from loraplex.model.config import load_config

    costs = known_costs(load_config(setting.served.base).shape, "cpu", torch.float32)
    memory = EngineMemory(
        max_context=MAX_POSITIONS,
        token_bytes=1 << 14,
        block_tokens=16,
        arena_bytes=None,
        kv_tokens=1 << 14,
        host_bytes=HOST_MIB << 20,
        table_bytes=0,
        rank_bytes=dict.fromkeys(TARGETS, 1 << 15),
    )
    return replace(costs, memory=memory)


def serve(setting: Setting, policy: Policy, name: str, workload: Sequence[WorkloadRequest]) -> Figures:
    """Serve a workload on a fleet of real replicas."""
    with running(setting.fleet(policy, name), log_path=setting.scratch / f"{name}.log") as server:
        return run(_serve(server, setting.traffic, workload))


async def _serve(server: RunningServer, traffic: Traffic, workload: Sequence[WorkloadRequest]) -> Figures:
    models = [adapter_name(number) for number in range(NUM_ADAPTERS)]
    first = [each for each in workload if each.arrival_s < traffic.counted_from_s]
    rest = workload[len(first) :]
    requests = workload_requests(
        PromptSource(seed=1, vocab_high=VOCAB_SIZE), workload=workload, models=models
    )
    async with CompletionClient(server.base_url) as client:
        await open_loop(client, requests[: len(first)], arrivals_s=[each.arrival_s for each in first])
        loads, sent = _loads(server), _sent(server)
        records = await open_loop(
            client,
            requests[len(first) :],
            arrivals_s=[each.arrival_s - traffic.counted_from_s for each in rest],
        )
    sent = [now - before for now, before in zip(_sent(server), sent, strict=True)]
    return Figures(
        adapter_loads=_loads(server) - loads,
        shares=[each / sum(sent) for each in sent],
        ttft_mean_s=fmean(map(_ttft_s, records)),
        gap_mean_s=fmean(gap_s for each in records for gap_s in np.diff(each.token_times_s)),
    )


def _ttft_s(record: RequestRecord) -> float:
    assert record.ok, record.error
    assert record.first_token_s is not None
    return record.first_token_s - record.arrival_s


def _get(server: RunningServer, path: str) -> str:
    with urllib.request.urlopen(server.base_url + path, timeout=30) as response:
        return str(response.read().decode())


def _loads(server: RunningServer) -> int:
    """Return the number of adapter loads into the memory of any replica."""
    return sum(int(count) for _, count in _LOADS.findall(_get(server, "/metrics")))


def _sent(server: RunningServer) -> list[int]:
    return [each["sent"] for each in json.loads(_get(server, "/v1/fleet"))["data"]]


def simulate(
    profile: CostModel, traffic: Traffic, policy: Policy, workload: Sequence[WorkloadRequest]
) -> Figures:
    """Simulate the workload on a fleet of the same size."""
    assert profile.memory is not None, "it was measured"
    options = FleetOptions(
        num_replicas=NUM_REPLICAS,
        replay=ReplayOptions(
            num_adapters=NUM_ADAPTERS,
            ranks=SERVED.ranks,
            modules=TARGETS,
            host_memory=HOST_MIB << 20,
            kv_tokens=(KV_MIB << 20) // profile.memory.token_bytes,
        ),
    )
    num_first = sum(each.arrival_s < traffic.counted_from_s for each in workload)
    whole = FleetRuns(profile, workload, options).run(policy)
    first = FleetRuns(profile, workload[:num_first], options).run(policy)
    chosen, counted = whole.chosen[num_first:], whole.all.requests[num_first:]
    gaps = [
        (each.finish_s - each.first_token_s, each.request.output_tokens - 1)
        for each in counted
        if each.first_token_s is not None and each.finish_s is not None
    ]
    return Figures(
        adapter_loads=whole.all.num_loads - first.all.num_loads,
        shares=[chosen.count(number) / len(chosen) for number in range(NUM_REPLICAS)],
        ttft_mean_s=fmean(each.ttft_s for each in counted if each.ttft_s is not None),
        gap_mean_s=sum(seconds for seconds, _ in gaps) / sum(count for _, count in gaps),
    )


def at_the_speed_of(
    live: Figures, profile: CostModel, traffic: Traffic, policy: Policy, workload: Sequence[WorkloadRequest]
) -> tuple[float, Figures]:
    """Simulate with steps scaled so that the mean gap between tokens equals the fleet's. Return the factor
    and the figures."""
    factor, twin = 1.0, simulate(profile, traffic, policy, workload)
    for _ in range(_ROUNDS):
        factor *= live.gap_mean_s / twin.gap_mean_s
        scaled = replace(profile, corrections=replace(profile.corrections, step=factor))
        twin = simulate(scaled, traffic, policy, workload)
    return factor, twin


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--repeats", type=int, default=3, help="measurements of each kind for the profile (3)"
    )
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"), help="the checkpoint")
    parser.add_argument("--profile", type=Path, help="of such an engine, measured before")
    parser.add_argument("--tiny", action="store_true", help="tries the script")
    parser.add_argument("--out", type=Path, help=f"default: results/{FILE}, nothing if --tiny")
    args = parser.parse_args(argv)
    traffic = Traffic(counted_from_s=5.0, duration_s=15.0) if args.tiny else Traffic()
    results = []
    with tempfile.TemporaryDirectory(prefix="loraplex-live-") as folder:
        scratch = Path(folder)
        home = scratch / "home"
        setting = Setting(
            served=checkpoint(args.work_dir / "live", num_adapters=NUM_ADAPTERS),
            scratch=scratch,
            traffic=traffic,
            env={"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")},
        )
        if args.tiny:
            profile = guessed(setting)
        else:
            profile = setting.measured(args.repeats) if args.profile is None else setting.given(args.profile)
        for seed in range(args.seeds):
            workload = traffic.workload(seed)
            for name in args.policies.split(","):
                policy = Policy.of_name(name)
                live = serve(setting, policy, f"{policy.routing}-{seed}", workload)
                factor, twin = at_the_speed_of(live, profile, traffic, policy, workload)
                results.append(
                    {
                        "policy": name,
                        "seed": seed,
                        "requests": len(workload),
                        "step_factor": round(factor, 3),
                        "live": live.document(),
                        "twin": twin.document(),
                        "differences": differences(live, twin),
                    }
                )
                print(json.dumps(results[-1]), flush=True)
    out = args.out or (None if args.tiny else RESULTS)
    if out is not None:
        document = environment() | {"sources": fingerprints(FILE), "results": results}
        write_whole(out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
