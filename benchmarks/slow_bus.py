"""Cold starts with copies slowed down: the regime in which CPU workers pay.

    python -m benchmarks.slow_bus --rates 12 6 --workloads DIR

For each rate in GB/s: the first token of one request on an idle engine, the paper's setups S1 to S3 and a
burst, by every policy. Only copies of adapters are slowed down: what goes between the device and CPU workers
is not. Run `python -m benchmarks.gpu_cold profile` before it on the same machine: `auto` decides by its
costs. Writes results/slow_bus.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import sources
from benchmarks.gpu_cold import (
    BURST,
    QKV,
    RESULTS,
    SETUPS,
    Setting,
    build,
    figures,
    in_process,
    maker,
    requests_of,
    rounded,
    workers,
)
from loraplex.bench.cold_scenarios import burst, compare_policies, measure_idle
from loraplex.bench.environment import ENGINE_PACKAGES, environment
from loraplex.core.cold_start import ColdStart

POLICIES: Final = tuple(ColdStart)
NUM_REQUESTS: Final = 60
NUM_IDLE: Final = 10
TOKENS: Final = (32, 128)


def measure(setting: Setting, gb_per_s: float, names: Sequence[str]) -> dict[str, Any]:
    """Return the figures of one rate. `names`: of setups."""
    engine = build(
        setting, cpu_workers=workers(), cold_start=ColdStart.CPU_ASSIST, max_copy_bytes_per_s=gb_per_s * 1e9
    )
    found: dict[str, Any] = {"idle": {}, "setups": {}}
    for tokens in TOKENS:
        idle = measure_idle(
            engine,
            POLICIES,
            maker(setting, 64, QKV),
            starts=("host",),
            num_adapters=NUM_IDLE,
            prompt_tokens=tokens,
            vocab_size=setting.vocab_size,
        )
        found["idle"][f"{tokens} tokens"] = {str(policy): figures(times) for policy, times in idle.items()}
    at_once = burst(
        engine,
        POLICIES,
        maker(setting, 64, QKV),
        size=BURST,
        prompt_tokens=setting.prompt_tokens,
        vocab_size=setting.vocab_size,
    )
    found["burst"] = {str(policy): rounded(times) for policy, times in at_once.items()}
    for setup in (setup for setup in SETUPS if setup.name in names):
        requests = requests_of(setting, setup)[:NUM_REQUESTS]
        compared = compare_policies(
            engine, POLICIES, requests, maker(setting, setup.rank, QKV), setting.vocab_size
        )
        found["setups"][setup.name] = {
            "rank": setup.rank,
            "requests_per_s": setup.requests_per_s,
            "num_requests": len(requests),
            "policies": {str(policy): one.as_json() for policy, one in compared.items()},
        }
        means_ms = {str(policy): one.distributions["ttft_ms"].mean for policy, one in compared.items()}
        print(setup.name, means_ms, flush=True)
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[12.0, 6.0], help="GB/s of copies")
    parser.add_argument("--setups", nargs="*", default=[setup.name for setup in SETUPS])
    parser.add_argument("--workloads", type=Path, default=Path("workloads"))
    parser.add_argument("--out", type=Path, default=RESULTS / "slow_bus.json")
    args = parser.parse_args()
    setting = replace(Setting(), workloads=args.workloads)
    document = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for rate in args.rates:
        started = time.perf_counter()
        found = in_process(partial(measure, setting, rate, args.setups))
        document[f"{rate:g} GB/s"] = in_process(partial(environment, ENGINE_PACKAGES)) | {
            "sources": sources.fingerprints("slow_bus.json"),
            "shape": setting.shape,
            "results": found,
        }
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"{rate:g} GB/s: {time.perf_counter() - started:.0f} s {json.dumps(found)[:1500]}", flush=True)


if __name__ == "__main__":
    main()
