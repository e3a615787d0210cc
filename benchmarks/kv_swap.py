"""Keys and values swapped to the host against computed again, in the twin of one GPU.

    python -m benchmarks.kv_swap                    all workloads, some minutes
    python -m benchmarks.kv_swap answers            these; the others keep their figures

Writes results/kv_swap.json. The engine's own scheduler runs on a virtual clock with the costs of the profile
`h200-llama-2-7b`, adapters of rank 16 on q, k and v. The goodput is the highest rate at which 90% of the
requests are within the SLO. It is found with all of the memory first; then KV memory is cut to a third of
what the requests that run there hold, and it is found again with recomputation only and with a host tier
(`--kv-swap-memory`), where the cheaper of swap and recompute is chosen for each victim. Both find prefixes on
the device. `overload` is a rate above both.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.cold_start import ColdStart
from loraplex.core.request import EngineRequest
from loraplex.perf.cost_model import CostModel
from loraplex.perf.drift import DriftWatch
from loraplex.perf.named_profiles import find_profile
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.host_kv import host_kv_of
from loraplex.scheduling.work import StepWork
from loraplex.twin.ahead import AheadSimulator
from loraplex.twin.highest_rate import highest_rate
from loraplex.twin.outcome import Outcome
from loraplex.twin.paused_collector import paused_collector
from loraplex.twin.slo import Slo
from loraplex.twin.times import CostModelTimes
from loraplex.workload.jsonl import WorkloadRequest

RESULTS: Final = Path(__file__).parent / "results"
FILE: Final = "kv_swap.json"
PROFILE: Final = "h200-llama-2-7b"
NUM_ADAPTERS: Final = 8
RANK: Final = 16
SHARE: Final = 1 / 3
"""Share of the KV memory that the running requests would hold."""
SWAP_BYTES: Final = 64 << 30
SLO: Final = Slo(ttft_s=5.0, tpot_s=0.1)
ATTAINMENT: Final = 0.9
DURATION_S: Final = 60.0
OVERLOAD: Final = 1.5


@dataclass(frozen=True)
class Requests:
    """A workload. `prompts`: the tokens of each prompt, or None where nothing is shared."""

    requests: Sequence[WorkloadRequest]
    prompts: Sequence[list[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """`draw`: returns the workload of a rate in requests per second. `first_rate`: the rate that is tried
    first."""

    name: str
    what: str
    draw: Callable[[float], Requests]
    first_rate: float = 8.0


class PromptSimulator(AheadSimulator):
    """An engine whose requests have prompts with something in common."""

    def __init__(self, prompts: Sequence[list[int]] | None, **options: Any) -> None:
        super().__init__(**options)
        self._prompts = prompts

    def _take(self, request: EngineRequest) -> None:
        if self._prompts is not None:
            request = replace(request, prompt_token_ids=self._prompts[int(request.request_id)])
        super()._take(request)


def lengths(prompt: int, output: int) -> Callable[[float], Requests]:
    """Return a draw of Poisson arrivals with exponential lengths of these means, cut at four times that."""

    def draw(rate: float) -> Requests:
        rng, now_s, requests = random.Random(0), 0.0, []
        while now_s < DURATION_S:
            now_s += rng.expovariate(rate)
            tokens = [min(max(int(rng.expovariate(1 / mean)), 2), 4 * mean) for mean in (prompt, output)]
            requests.append(_request(now_s, rng.randrange(NUM_ADAPTERS), *tokens))
        return Requests(requests)

    return draw


def conversations(rate: float) -> Requests:
    """Return conversations of six turns, 20 s apart, each of which repeats what was said before."""
    rng, now_s, turns = random.Random(0), 0.0, []
    number = 0
    while now_s < DURATION_S:
        now_s += rng.expovariate(rate / 6)
        number += 1
        adapter, begin_s = rng.randrange(NUM_ADAPTERS), now_s
        said = [1000 + adapter] * 256 + [10_000 + number] * 200
        for _ in range(6):
            turns.append((begin_s, adapter, list(said), 100))
            said = [*said, *[1] * 100, *[20_000 + rng.randrange(10_000)] * 150]
            begin_s += rng.expovariate(1 / 20)
    turns.sort(key=lambda turn: turn[0])
    return Requests(
        [_request(at_s, adapter, len(prompt), output) for at_s, adapter, prompt, output in turns],
        [prompt for _, _, prompt, _ in turns],
    )


def _request(arrival_s: float, adapter: int, prompt_tokens: int, output_tokens: int) -> WorkloadRequest:
    return WorkloadRequest(
        arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens, adapter=adapter
    )


LOADS: Final = (
    Load(name="answers", what="prompts of 200 tokens and answers of 600", draw=lengths(200, 600)),
    Load(name="balanced", what="prompts of 500 tokens and answers of 500", draw=lengths(500, 500)),
    Load(name="documents", what="prompts of 900 tokens and answers of 200", draw=lengths(900, 200)),
    Load(
        name="conversations",
        what="conversations of six turns, 20 s apart",
        draw=conversations,
        first_rate=60.0,
    ),
)


def run(profile: CostModel, drawn: Requests, kv_tokens: int, swap_bytes: int) -> Outcome:
    """Simulate a workload with so much memory for KV blocks and adapters together."""
    has = profile.memory
    assert has is not None
    versions = [f"adapter-{number}" for number in range(NUM_ADAPTERS)]
    sizes = dict.fromkeys(versions, has.adapter_bytes(RANK, ("q_proj", "k_proj", "v_proj")))
    page_bytes = has.token_bytes * has.block_tokens
    simulator = PromptSimulator(
        drawn.prompts,
        config=SchedulerConfig(
            max_model_len=has.max_context,
            work=StepWork(max_tokens=has.step_tokens, position_cost=has.position_cost),
            cold_start=ColdStart.AUTO,
        ),
        memory=Arena(
            num_pages=kv_tokens // has.block_tokens - (-sum(sizes.values()) // page_bytes),
            page_bytes=page_bytes,
            block_size=has.block_tokens,
            host_bytes=2 * sum(sizes.values()),
            host_kv=host_kv_of(swap_bytes, page_bytes),
        ),
        times=CostModelTimes(profile, sizes),
        adapters=versions,
        costs=DriftWatch(profile),
    )
    for version, num_bytes in sizes.items():
        simulator.scheduler.adapters.add(version, num_bytes)
    with paused_collector():
        simulator.stage_all()
        return simulator.run(drawn.requests)


def figures(outcome: Outcome) -> dict[str, float]:
    summary = outcome.summary()
    attained = sum(SLO.is_attained(each) for each in outcome.requests)
    return {
        "attainment": attained / len(outcome.requests),
        "output_tok_s": summary["output_tok_s"],
        "duration_s": outcome.duration_s,
        "ttft_mean_s": summary["ttft_s"]["mean"],
        "tpt_mean_s": summary["tpt_s"]["mean"],
        "num_preemptions": outcome.num_preemptions,
        "num_swapped_out": outcome.num_swapped_out,
        "num_swapped_in": outcome.num_swapped_in,
    }


def goodput(profile: CostModel, load: Load, kv_tokens: int, swap_bytes: int) -> float:
    """Return the highest rate at which enough requests are within the SLO."""

    def holds(rate: float) -> bool:
        return figures(run(profile, load.draw(rate), kv_tokens, swap_bytes))["attainment"] >= ATTAINMENT

    return highest_rate(holds, load.first_rate) or 0.0


def measure(profile: CostModel, load: Load) -> dict[str, Any]:
    """Return the section of one workload."""
    has = profile.memory
    assert has is not None
    assert has.arena_bytes is not None
    all_tokens = has.arena_bytes // has.token_bytes
    most = goodput(profile, load, all_tokens, 0)
    drawn = load.draw(most)
    running = run(profile, drawn, all_tokens, 0).mean_running
    held = sum(each.prompt_tokens + each.output_tokens / 2 for each in drawn.requests) / len(drawn.requests)
    kv_tokens = int(running * held * SHARE)
    rates = {
        name: goodput(profile, load, kv_tokens, swap_bytes)
        for name, swap_bytes in (("recompute", 0), ("swap", SWAP_BYTES))
    }
    overload = OVERLOAD * max(rates.values())
    return {
        "what": load.what,
        "slo": SLO.in_words(),
        "attainment": ATTAINMENT,
        "all_memory": {"kv_tokens": all_tokens, "goodput_rps": most, "mean_running": running},
        "kv_tokens": kv_tokens,
        "goodput_rps": rates,
        "goodput_ratio": rates["swap"] / rates["recompute"],
        "at": {
            f"{rate:.3g} requests/s": {
                name: figures(run(profile, load.draw(rate), kv_tokens, swap_bytes))
                for name, swap_bytes in (("recompute", 0), ("swap", SWAP_BYTES))
            }
            for rate in (rates["recompute"], overload)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [load.name for load in LOADS]
    parser.add_argument("sections", nargs="*", default=names, help=", ".join(names))
    parser.add_argument("--out", type=Path, default=RESULTS / FILE)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(names):
        parser.error(f"no section {min(unknown)!r}; there are {', '.join(names)}")
    profile = find_profile(Path(PROFILE))
    assert isinstance(profile, CostModel)
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    sections = found.get("sections", {})
    for load in LOADS:
        if load.name in args.sections:
            sections[load.name] = measure(profile, load)
            print(f"{load.name}: {sections[load.name]['goodput_rps']}", file=sys.stderr, flush=True)
    result = {
        **environment(("loraplex", "numpy")),
        "sources": fingerprints(FILE),
        "profile": PROFILE,
        "sections": sections,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
