"""Batching policies against first come, first served, in the twin of one GPU.

    python -m benchmarks.batching                 all sections, some minutes
    python -m benchmarks.batching skew            these; the others keep their figures

Writes results/batching.json. The engine's own scheduler runs on a virtual clock with the costs of the profile
`h200-llama-2-7b`, and merging as `benchmarks.gpu_batching` measured it at rank 128, the slowest. Adapters are
in host memory at the start. Every figure is the mean of the seeds, with each seed's beside it.

queue   1,000 or 3,000 requests at once: output tokens per second over the base model's, and by how much the
        worst first token came later than the bound allows, compared with first come, first served
skew    dLoRA's section 7.3: 8 adapters of rank 8, which have 4, 8, 16 or 32 of MAF's functions at a time, the
        most frequent ones first, at a load that a step of 16 requests cannot serve in time; once with our
        costs, and once with those of dLoRA's published code (15 ms for an iteration of merged weights, 27 ms
        unmerged, 20 ms to switch). Poisson arrivals, and log-normal lengths like those of ShareGPT's turns
hot     one adapter of rank 128 on all linears with 90% of the requests, 7 others, 60 requests/s
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.batching import Batching, DelayBound
from loraplex.core.modules import GROUPS, MODULES
from loraplex.perf.cost_model import CostModel
from loraplex.perf.line import Line
from loraplex.perf.named_profiles import find_profile
from loraplex.scheduling.batching.thresholds import Tuning
from loraplex.twin.delays import beyond_bound_s
from loraplex.twin.outcome import Outcome
from loraplex.twin.replay import ReplayOptions, replay
from loraplex.workload.jsonl import WorkloadRequest

RESULTS: Final = Path(__file__).parent / "results"
FILE: Final = "batching.json"
PROFILE: Final = "h200-llama-2-7b"
SEEDS: Final = (0, 1, 2)
BOUND: Final = DelayBound()
LOOSE: Final = DelayBound(share=100.0, seconds=100.0)


class Lengths(NamedTuple):
    """Log-normal lengths in tokens: mean and standard deviation of the logarithm, and the most of each."""

    prompt: tuple[float, float]
    output: tuple[float, float]
    most: tuple[int, int]

    def draw(self, rng: random.Random) -> tuple[int, int]:
        prompt, output = rng.lognormvariate(*self.prompt), rng.lognormvariate(*self.output)
        return min(max(int(prompt), 4), self.most[0]), min(max(int(output), 4), self.most[1])


POLICIES: Final[dict[str, dict[str, Any]]] = {
    "fcfs": {"batching": Batching.FCFS},
    "merged": {"batching": Batching.MERGED},
    "dynamic": {"batching": Batching.DYNAMIC},
    "dynamic, tuned as in dLoRA's code": {"batching": Batching.DYNAMIC, "tuning": Tuning.ARTIFACT},
    "grouped": {"batching": Batching.GROUPED},
    "grouped, without a bound": {"batching": Batching.GROUPED, "max_delay": LOOSE},
    "auto": {"batching": Batching.AUTO},
}
MAF_SHARES: Final = {
    4: (0.3320, 0.1754, 0.1228, 0.1031, 0.0835, 0.0670, 0.0606, 0.0556),
    8: (0.4426, 0.1829, 0.1145, 0.0850, 0.0648, 0.0430, 0.0360, 0.0312),
    16: (0.5892, 0.1682, 0.0873, 0.0519, 0.0363, 0.0312, 0.0205, 0.0154),
    32: (0.7404, 0.1274, 0.0568, 0.0294, 0.0170, 0.0118, 0.0107, 0.0065),
}
"""Shares of a day's calls of 1,000 functions (Azure Functions, 2019): sorted by calls, and so many at a time
given to each of eight adapters, in rounds."""
CHAT: Final = Lengths(prompt=(5.0, 1.0), output=(5.0, 0.8), most=(1000, 800))
SHAREGPT: Final = Lengths(prompt=(math.log(120), 1.25), output=(math.log(150), 1.0), most=(3072, 1024))
_DLORA_STEP_S: Final = 15e-3
_DLORA_LORA_S: Final = 12e-3
_DLORA_SWITCH_S: Final = 20e-3
_DLORA_BATCH: Final = 16
DLORA_RPS, OUR_RPS = 4.0, 20.0
"""Requests a second in `skew`: dLoRA's, and one and a half times what our costs allow unmerged, too."""

Requests = Sequence[WorkloadRequest]


def our_costs() -> CostModel:
    profile = find_profile(Path(PROFILE))
    assert isinstance(profile, CostModel)
    measured = json.loads((RESULTS / "gpu_batching.json").read_text())["merge"]["results"]
    slowest_s = max(row["merge_ms"] / 1e3 / (row["merged_mb"] * 1e6) for row in measured)
    return replace(profile, merge=Line(latency_s=0.0, unit_s=slowest_s))


def dlora_costs() -> CostModel:
    """Return our profile, slowed down to dLoRA's iterations, with its constant costs of LoRA and of a
    switch."""
    profile = our_costs()
    step = profile.step
    factor = _DLORA_STEP_S / step.decodes.seconds(_DLORA_BATCH)
    decodes, prompts = (
        replace(curve, seconds_at=tuple(seconds * factor for seconds in curve.seconds_at))
        for curve in (step.decodes, step.prompts)
    )
    terms = replace(step.terms, lora_s=_DLORA_LORA_S, prompt_lora_s=0.0)
    return replace(
        profile,
        step=replace(step, decodes=decodes, prompts=prompts, terms=terms),
        merge=Line(latency_s=_DLORA_SWITCH_S, unit_s=0.0),
    )


def burst(seed: int, num_adapters: int, *, num_requests: int) -> Requests:
    """Return requests that arrive together, of 128 prompt and 160 output tokens on average."""
    rng = random.Random(seed)
    return [
        _request(0.0, rng.randint(64, 192), rng.randint(64, 256), rng.randrange(num_adapters))
        for _ in range(num_requests)
    ]


def stream(
    seed: int, rate: float, shares: Sequence[float], num_requests: int, lengths: Lengths = CHAT
) -> Requests:
    """Return Poisson arrivals."""
    rng, now_s, made = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        now_s += rng.expovariate(rate)
        prompt, output = lengths.draw(rng)
        adapter = rng.choices(range(len(shares)), shares)[0]
        made.append(_request(now_s, prompt, output, adapter))
    return made


def skewed(seed: int, rate: float, stride: int, num_requests: int = 400) -> Requests:
    """Return dLoRA's load: requests for eight adapters that have so many of MAF's functions at a time."""
    return stream(seed, rate, MAF_SHARES[stride], num_requests, SHAREGPT)


def _request(arrival_s: float, prompt_tokens: int, output_tokens: int, adapter: int) -> WorkloadRequest:
    return WorkloadRequest(
        arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens, adapter=adapter
    )


def figures(outcome: Outcome, beside: Outcome) -> dict[str, float]:
    """Return the figures of a run; `beside`: the same requests, first come, first served."""
    served = outcome.requests
    num_tokens = sum(each.request.output_tokens for each in served)
    ends = [each.finish_s or 0.0 for each in served]
    e2e = sorted(end - each.request.arrival_s for end, each in zip(ends, served, strict=True))
    per_token = sorted(each.tpt_s or 0.0 for each in served)
    return {
        "output_tok_s": num_tokens / max(ends),
        "s_per_token": sum(e2e) / num_tokens,
        "s_per_token_p90": per_token[int(0.9 * len(per_token))],
        "e2e_mean_s": fmean(e2e),
        "e2e_p90_s": e2e[int(0.9 * len(e2e))],
        "e2e_max_s": e2e[-1],
        "ttft_mean_s": fmean(each.ttft_s or 0.0 for each in served),
        "beyond_bound_s": beyond_bound_s(served, beside.requests, BOUND) or 0.0,
    }


def compare(
    profile: CostModel,
    draw: Callable[[int], Requests],
    policies: Sequence[str],
    *,
    base: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Run all policies on the same requests. `base`: also on the base model alone."""
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in SEEDS:
        requests = draw(seed)
        outcomes = {
            name: replay(profile, requests, ReplayOptions(staged=True, **options, **POLICIES[name]))
            for name in policies
        }
        if base:
            alone = [replace(each, adapter=0) for each in requests]
            limits = {name: value for name, value in options.items() if name == "max_running"}
            outcomes["base model"] = replay(profile, alone, ReplayOptions(num_adapters=0, **limits))
        for name, outcome in outcomes.items():
            runs.setdefault(name, []).append(figures(outcome, outcomes["fcfs"]))
    return {
        name: {
            figure: {
                "mean": fmean(run[figure] for run in of_seeds),
                "runs": [run[figure] for run in of_seeds],
            }
            for figure in of_seeds[0]
        }
        for name, of_seeds in runs.items()
    }


def queue() -> dict[str, Any]:
    policies = ("fcfs", "grouped", "grouped, without a bound", "auto")
    return {
        what: compare(
            our_costs(),
            lambda seed, count=count, length=length: burst(seed, count, num_requests=length),  # type: ignore[misc]
            policies,
            base=True,
            num_adapters=count,
            ranks=(rank,),
            modules=modules,
        )
        for what, length, count, rank, modules in (
            ("1,000 requests, 200 of rank 64 on q, k and v", 1000, 200, 64, GROUPS["qkv"]),
            ("3,000 requests, the same", 3000, 200, 64, GROUPS["qkv"]),
            ("1,000 requests, 256 of rank 16 on all linears", 1000, 256, 16, MODULES),
        )
    }


def skew() -> dict[str, Any]:
    policies = ("fcfs", "merged", "dynamic", "dynamic, tuned as in dLoRA's code", "grouped", "auto")
    return {
        f"{costs}, {stride} functions each": compare(
            profile,
            lambda seed, rate=rate, stride=stride: skewed(seed, rate, stride),  # type: ignore[misc]
            policies,
            num_adapters=8,
            ranks=(8,),
            max_running=_DLORA_BATCH,
        )
        for costs, profile, rate in (
            ("dLoRA's costs", dlora_costs(), DLORA_RPS),
            ("our costs", our_costs(), OUR_RPS),
        )
        for stride in MAF_SHARES
    }


def hot() -> dict[str, Any]:
    shares = [0.9, *[0.1 / 7] * 7]
    return {
        "90% on one of rank 128, all linears, 60 requests/s": compare(
            our_costs(),
            lambda seed: stream(seed, 60.0, shares, 1200),
            ("fcfs", "merged", "dynamic", "auto"),
            base=True,
            num_adapters=8,
            ranks=(128,),
            modules=MODULES,
        ),
        "all on one of rank 128, all linears, 60 requests/s": compare(
            our_costs(),
            lambda seed: stream(seed, 60.0, [1.0], 1200),
            ("fcfs", "merged", "dynamic", "auto"),
            base=True,
            num_adapters=1,
            ranks=(128,),
            modules=MODULES,
        ),
    }


SECTIONS: Final[dict[str, Callable[[], dict[str, Any]]]] = {"queue": queue, "skew": skew, "hot": hot}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=RESULTS / FILE)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {min(unknown)!r}; there are {', '.join(SECTIONS)}")
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.sections:
        result[name] = {
            **environment(("loraplex", "numpy")),
            "sources": fingerprints(FILE),
            "profile": PROFILE,
            "seeds": list(SEEDS),
            "cases": SECTIONS[name](),
        }
        print(f"{name} is done", file=sys.stderr, flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
