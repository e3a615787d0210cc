"""Cold starts with copies slowed down, simulated: the twin's figures for the cases of `benchmarks.slow_bus`.

    python -m benchmarks.twin_slow_bus --workloads DIR

Simulates one request on an idle engine, a burst and the setups S1 to S3 by every policy, at the rates that
results/slow_bus.json has, setups that it does not have as well, by the profile that `benchmarks.gpu_cold
profile` fitted. Takes seconds on any machine. Writes results/twin_slow_bus.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.cost_tables import cost_model
from benchmarks.gpu_cold import BURST, RESULTS, SETUPS, Setting, requests_of
from benchmarks.slow_bus import NUM_REQUESTS, POLICIES, TOKENS
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.cold_start import ColdStart
from loraplex.perf.cost_model import CostModel
from loraplex.twin.replay import ReplayOptions, replay
from loraplex.workload.jsonl import WorkloadRequest

FILE: Final = "twin_slow_bus.json"
NUM_WORKERS: Final = 8
"""CPU workers of the measured engine: one for every second of its 16 cores."""
_LOADED_S: Final = 60.0
"""Seconds before the first request, in which `cached` loads all adapters."""


def simulate(
    profile: CostModel,
    policy: ColdStart,
    requests: Sequence[WorkloadRequest],
    *,
    gb_per_s: float,
    rank: int = 64,
) -> float:
    """Return the mean TTFT in milliseconds of requests that are each on an adapter of their own, in host
    memory."""
    later = [
        replace(request, arrival_s=request.arrival_s + _LOADED_S, adapter=number)
        for number, request in enumerate(requests)
    ]
    options = ReplayOptions(
        num_adapters=len(later),
        ranks=(rank,),
        cold_start=policy,
        cpu_workers=NUM_WORKERS if policy in (ColdStart.CPU_ASSIST, ColdStart.AUTO) else 0,
        max_copy_bytes_per_s=gb_per_s * 1e9,
        staged=True,
    )
    waits_s = [each.ttft_s for each in replay(profile, later, options).requests]
    return round(fmean(wait_s for wait_s in waits_s if wait_s is not None) * 1e3, 3)


def figures(profile: CostModel, setting: Setting, gb_per_s: float) -> dict[str, Any]:
    """Return the mean TTFT at one rate by case and policy."""

    def means(requests: Sequence[WorkloadRequest], rank: int = 64) -> dict[str, float]:
        return {
            str(policy): simulate(profile, policy, requests, gb_per_s=gb_per_s, rank=rank)
            for policy in POLICIES
        }

    def alone(num_tokens: int) -> WorkloadRequest:
        return WorkloadRequest(arrival_s=0.0, prompt_tokens=num_tokens, output_tokens=2, adapter=0)

    return {
        "idle": {f"{tokens} tokens": means([alone(tokens)]) for tokens in TOKENS},
        "burst": means([alone(setting.prompt_tokens)] * BURST),
        "setups": {
            setup.name: means(requests_of(setting, setup)[:NUM_REQUESTS], setup.rank) for setup in SETUPS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", type=Path, default=Path("workloads"))
    parser.add_argument("--out", type=Path, default=RESULTS / FILE)
    args = parser.parse_args()
    setting = replace(Setting(), workloads=args.workloads)
    profile = cost_model(json.loads((RESULTS / "gpu_cold.json").read_text(encoding="utf-8")))
    measured = json.loads((RESULTS / "slow_bus.json").read_text(encoding="utf-8"))
    found = {rate: figures(profile, setting, float(rate.split()[0])) for rate in measured}
    document = environment(("loraplex", "numpy")) | {
        "sources": fingerprints(FILE),
        "num_workers": NUM_WORKERS,
        "ttft_mean_ms": found,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
