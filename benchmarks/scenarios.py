"""Scenarios of loraplex alone: far more adapters than fit in memory, and clients that hold connections."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import engines
from benchmarks.bystanders import bystanders
from benchmarks.make_checkpoint import SERVED, Checkpoint
from benchmarks.measure import Traffic, measure, with_median
from benchmarks.servers import RunningServer, running
from loraplex.bench.load import run
from loraplex.bench.report import Report

NUM_RESIDENT = 100
NUM_CHURN_REQUESTS = 400
NUM_HOT_ADAPTERS = 16
NUM_IDLE_CLIENTS = 64
NUM_SLOW_READERS = 16
SLOW_ANSWER_TOKENS = 1024

_REGISTERED = re.compile(r"registered ([\d,]+) adapters in ([\d.]+) ?(ms|s)\b", re.IGNORECASE)


def many_adapters(
    checkpoint: Checkpoint, traffic: Traffic, *, repeats: int, scratch: Path, logs: Path, program: str | None
) -> dict[str, Any]:
    """Measure 1,000 adapters in turn with memory for 100, so that every request finds its adapter evicted,
    against 16 of them, all in memory, on the same server and with as many requests."""
    budget_bytes = NUM_RESIDENT * sum(map(SERVED.adapter_bytes, SERVED.ranks)) // len(SERVED.ranks)
    engine = engines.loraplex(
        checkpoint,
        state_dir=scratch / "state-many",
        extra=("--host-adapter-memory", str(budget_bytes)),
        program=program,
    )
    _fill_page_cache(checkpoint.adapters)
    names = checkpoint.adapter_names
    hot, churn = [], []
    spawned_s = perf_counter()
    with running(engine.command, log_path=logs / "many-adapters.log") as server:
        num_listed = _num_adapters_listed(server)
        listed_s = perf_counter() - spawned_s
        for repeat in range(repeats):
            hot.append(_closed(server, traffic, names[:NUM_HOT_ADAPTERS], seed=2 * repeat))
            start = repeat * NUM_CHURN_REQUESTS % len(names)
            turn = [*names[start:], *names[:start]]
            churn.append(_closed(server, traffic, turn, seed=2 * repeat + 1))
        registration = _registration(server)
    return {
        "adapters_on_disk": len(names),
        "adapters_listed_at_health": num_listed,
        "adapters_that_fit": NUM_RESIDENT,
        "host_adapter_bytes": budget_bytes,
        "requests_per_run": NUM_CHURN_REQUESTS,
        "start_s": round(server.start_s, 2),
        "start_and_list_s": round(listed_s, 2),
        "registration": registration,
        "all_in_memory": with_median([report.as_json() for report in hot]),
        "in_turn": with_median([report.as_json() for report in churn]),
    }


def with_bystanders(
    checkpoint: Checkpoint, traffic: Traffic, *, repeats: int, scratch: Path, logs: Path, program: str | None
) -> dict[str, Any]:
    """Measure the published traffic alone, and among idle and slow clients, in turn on one server."""
    engine = engines.loraplex(checkpoint, state_dir=scratch / "state-bystanders", program=program)
    names = checkpoint.adapter_names
    alone, among = [], []
    with running(engine.command, log_path=logs / "bystanders.log") as server:
        _closed(server, traffic, names, seed=999, num_requests=2 * traffic.concurrency)
        for repeat in range(repeats):
            alone.append(_closed(server, traffic, names, seed=2 * repeat, num_requests=traffic.num_requests))
            among.append(run(_among(server, traffic, names, seed=2 * repeat + 1)))
    return {
        "idle_clients": NUM_IDLE_CLIENTS,
        "slow_readers": NUM_SLOW_READERS,
        "alone": with_median([report.as_json() for report in alone]),
        "among_bystanders": with_median([report.as_json() for report in among]),
    }


async def _among(server: RunningServer, traffic: Traffic, names: Sequence[str], *, seed: int) -> Report:
    long = Traffic(prompt_tokens=traffic.prompt_tokens, output_tokens=SLOW_ANSWER_TOKENS)
    *slow, probe = long.requests(names, seed=10_000 + seed, num_requests=NUM_SLOW_READERS + 1)
    requests = traffic.requests(names, seed=seed)
    async with bystanders(server.base_url, num_idle=NUM_IDLE_CLIENTS, slow_requests=slow, probe=probe):
        return await measure(server.base_url, requests, concurrency=traffic.concurrency)


def _closed(
    server: RunningServer,
    traffic: Traffic,
    names: Sequence[str],
    *,
    seed: int,
    num_requests: int = NUM_CHURN_REQUESTS,
) -> Report:
    requests = traffic.requests(names, seed=seed, num_requests=num_requests)
    report = run(measure(server.base_url, requests, concurrency=traffic.concurrency))
    print(f"{len(names)} adapters  {report.output_tokens_per_s:7.1f} tok/s  {report.ttft_ms}", flush=True)
    return report


def _fill_page_cache(directory: Path) -> None:
    for path in directory.rglob("*.safetensors"):
        path.read_bytes()


def _num_adapters_listed(server: RunningServer) -> int:
    with urllib.request.urlopen(f"{server.base_url}/v1/models", timeout=60) as response:
        models = json.load(response)["data"]
    return sum(1 for model in models if model.get("parent") is not None)


def _registration(server: RunningServer) -> dict[str, Any] | None:
    """Return the registration time of adapters from the server's log; None if it is not there."""
    found = _REGISTERED.search(server.log_path.read_text(errors="replace"))
    if found is None:
        return None
    seconds = float(found[2]) * (1e-3 if found[3] == "ms" else 1.0)
    return {"adapters": int(found[1].replace(",", "")), "seconds": round(seconds, 3)}
