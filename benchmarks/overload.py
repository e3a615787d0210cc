"""Measure goodput under overload: requests answered in time at twice the peak's rate, over those at the peak.

    python -m benchmarks.overload                         # six minutes on a quiet machine
    python -m benchmarks.overload --setting tenants       # as long
    python -m benchmarks.overload --setting fleet         # as long

A server with a small random model serves requests that arrive at random times (Poisson), each sent once. A
request is good if it is answered in full and its first token came within the bound. Without a bound, rates
around the server's capacity are tried in turn; the one with the most good requests per second is the peak.
With it, windows at that rate and at twice that rate take turns. The bound is `--max-ttft`; in the setting
`tenants` it is an objective of each of five tenants, one of which sends all requests beyond the peak's rate.
In the setting `fleet` the server is a fleet's front. Ratios are within one run, since the machine may be
shared. `--tiny` tests the script itself in seconds, and writes nothing without --out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from benchmarks import engines
from benchmarks.cpu_serve import checkpoint
from benchmarks.make_checkpoint import adapter_name
from benchmarks.servers import RunningServer, running
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.whole_file import write_whole
from loraplex.server.tenants.tenants_edit import add_tenant

FILES: Final = {
    "server": "overload.json",
    "tenants": "overload_tenants.json",
    "fleet": "overload_fleet.json",
}
"""Result files by setting."""
RESULTS: Final = Path(__file__).parent / "results"
NUM_TENANTS: Final = 5
NUM_ADAPTERS: Final = 16
PROMPT_TOKENS: Final = (64, 256)
OUTPUT_TOKENS: Final = (16, 64)
RATES: Final = (0.6, 0.75, 0.9, 1.0, 1.15)
"""Rates to try, relative to the server's throughput when as many requests as fit are always in flight."""
OVERLOAD: Final = 2.0
SOON_S: Final = 0.05
"""Seconds within which 95 of 100 refusals are wanted."""
WARM_UP_SHARE: Final = 0.2
"""Share of a window, at its start, whose requests do not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The outcome of one request. `ttft_s`: None if it had no token; `total_s`: until its last byte;
    `tenant`: the number of its tenant, of which 0 asks for too much."""

    status: int
    ttft_s: float | None
    total_s: float
    is_whole: bool
    tenant: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The length of windows, and the number of requests in flight to measure a server's capacity."""

    window_s: float = 20.0
    num_at_a_time: int = 64
    rounds: int = 4


def summarized(seen: Sequence[Seen], *, counted_s: float, max_ttft_s: float) -> dict[str, Any]:
    """Return the figures of all requests, which arrived within `counted_s` seconds."""
    good = [each for each in seen if each.is_whole and each.ttft_s is not None and each.ttft_s <= max_ttft_s]
    whole = [each.ttft_s for each in seen if each.is_whole and each.ttft_s is not None]
    refused = [each.total_s for each in seen if each.status == 429]
    num_others = sum(each.tenant != 0 for each in seen)
    return {
        "requests": len(seen),
        "good": len(good),
        "answered": len(whole),
        "refused": len(refused),
        "failed": len(seen) - len(whole) - len(refused),
        "goodput_per_s": round(len(good) / counted_s, 3),
        "others_in_time": round(sum(each.tenant != 0 for each in good) / num_others, 4)
        if num_others
        else None,
        "ttft_p50_s": _quantile(whole, 0.5),
        "ttft_p95_s": _quantile(whole, 0.95),
        "refused_within_50_ms": None
        if not refused
        else round(sum(each <= SOON_S for each in refused) / len(refused), 4),
        "refusal_p50_ms": _quantile([1e3 * each for each in refused], 0.5),
        "refusal_p99_ms": _quantile([1e3 * each for each in refused], 0.99),
    }


def _quantile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    return round(sorted(values)[min(int(share * len(values)), len(values) - 1)], 4)


class Client:
    """Sends requests of random lengths for random adapters, by tenants with these keys."""

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, *, seed: int, keys: Sequence[str] = ("none",)
    ) -> None:
        self._session = session
        self._keys = keys
        self._url = f"{base_url}/v1/completions"
        self._random = random.Random(seed)

    def next_s(self, rate: float) -> float:
        """Return the seconds until the next arrival."""
        return self._random.expovariate(rate)

    async def send(self, excess: float = 0.0) -> Seen:
        """Send a request. `excess`: share of requests that the first tenant sends beyond an equal part."""
        is_excess = self._random.random() < excess
        tenant = 0 if is_excess else self._random.randrange(len(self._keys))
        headers = {"Authorization": f"Bearer {self._keys[tenant]}"}
        num_tokens = self._random.randint(*OUTPUT_TOKENS)
        body = {
            "model": adapter_name(self._random.randrange(NUM_ADAPTERS)),
            "prompt": [self._random.randint(3, 4000) for _ in range(self._random.randint(*PROMPT_TOKENS))],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        sent_s = time.perf_counter()
        ttft_s, said = None, b""
        async with self._session.post(self._url, json=body, headers=headers) as response:
            async for chunk in response.content.iter_any():
                if ttft_s is None and response.status == 200:
                    ttft_s = time.perf_counter() - sent_s
                said = (said + chunk)[-64:]
        is_whole = response.status == 200 and said.rstrip().endswith(b"[DONE]")
        total_s = time.perf_counter() - sent_s
        return Seen(status=response.status, ttft_s=ttft_s, total_s=total_s, is_whole=is_whole, tenant=tenant)


async def window(
    client: Client, *, rate: float, load: Load, max_ttft_s: float, excess: float = 0.0
) -> dict[str, Any]:
    """Send requests at this rate for one window; return the figures of those after its warm-up."""
    begun_s = due_s = time.perf_counter()
    counted: list[asyncio.Task[Seen]] = []
    async with asyncio.TaskGroup() as requests:
        while (due_s := due_s + client.next_s(rate)) < begun_s + load.window_s:
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            task = requests.create_task(client.send(excess))
            if due_s >= begun_s + WARM_UP_SHARE * load.window_s:
                counted.append(task)
    counted_s = (1 - WARM_UP_SHARE) * load.window_s
    seen = [task.result() for task in counted]
    return {"rate": round(rate, 3)} | summarized(seen, counted_s=counted_s, max_ttft_s=max_ttft_s)


async def capacity(client: Client, load: Load) -> float:
    """Return the answered requests per second with a constant number in flight; refused ones do not count."""
    until_s = time.perf_counter() + load.window_s
    num_answered = 0

    async def send_on() -> None:
        nonlocal num_answered
        while time.perf_counter() < until_s:
            seen = await client.send()
            if seen.is_whole:
                num_answered += 1
            else:
                await asyncio.sleep(0.05)

    begun_s = time.perf_counter()
    await asyncio.gather(*(send_on() for _ in range(load.num_at_a_time)))
    return max(num_answered / (time.perf_counter() - begun_s), 0.1)


def session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def _measure(
    client: Client, rate: float, load: Load, max_ttft_s: float, excess: float = 0.0
) -> dict[str, Any]:
    found = await window(client, rate=rate, load=load, max_ttft_s=max_ttft_s, excess=excess)
    print(json.dumps(found), flush=True)
    return found


async def unbounded(base_url: str, *, load: Load, max_ttft_s: float) -> dict[str, Any]:
    """Find the peak of a server that refuses nothing, and its goodput at twice the peak's rate."""
    async with session() as connections:
        client = Client(connections, base_url, seed=1)
        most = await capacity(client, load)
        tried = [await _measure(client, share * most, load, max_ttft_s) for share in RATES]
        peak = max(tried, key=lambda found: found["goodput_per_s"])
        beyond = await _measure(client, OVERLOAD * peak["rate"], load, max_ttft_s)
    return {"capacity_per_s": round(most, 3), "tried": tried, "peak": peak, "overload": beyond}


async def bounded(
    base_url: str, *, rate: float, load: Load, max_ttft_s: float, keys: Sequence[str] = ("none",)
) -> dict[str, Any]:
    """Run windows at the peak's rate and at twice that rate, in turn; the first one is a warm-up."""
    at_peak, beyond = [], []
    async with session() as connections:
        client = Client(connections, base_url, seed=2, keys=keys)
        await _measure(client, rate, load, max_ttft_s)
        for _ in range(load.rounds):
            at_peak.append(await _measure(client, rate, load, max_ttft_s))
            beyond.append(await _measure(client, OVERLOAD * rate, load, max_ttft_s, 1 - 1 / OVERLOAD))
    return {"peak": at_peak, "overload": beyond}


def ratio(without: dict[str, Any], bound: dict[str, Any]) -> float:
    """Return the mean goodput at overload over that at the peak, with or without the bound, whichever is
    higher."""
    beyond, at_peak = (
        statistics.fmean(each["goodput_per_s"] for each in bound[name]) for name in ("overload", "peak")
    )
    most = max(at_peak, without["peak"]["goodput_per_s"])
    return round(beyond / most, 3) if most else 0.0


def server_options(args: argparse.Namespace) -> str:
    replicas = f"--replicas {args.replicas} " if args.setting == "fleet" else ""
    return f"{replicas}{args.server_options}"


class Servers:
    """The servers of a setting. They have one state folder, so that all but the first start quickly."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self._args, self._scratch = args, scratch
        self._model = checkpoint(args.work_dir.resolve() / "checkpoint-16", num_adapters=NUM_ADAPTERS)

    def run(self, *options: str) -> AbstractContextManager[RunningServer]:
        """Run a server with these options."""
        engine = engines.loraplex(
            self._model,
            state_dir=self._scratch,
            program=self._args.loraplex,
            command=("fleet", "serve") if self._args.setting == "fleet" else ("serve",),
            extra=(*server_options(self._args).split(), *options),
        )
        return running(engine.command, log_path=self._args.work_dir / "overload.log")

    def bound(self) -> tuple[Sequence[str], Sequence[str]]:
        """Return the options that bound the time to the first token, and the keys of clients."""
        bound_s = f"{self._args.max_ttft:g}"
        if self._args.setting != "tenants":
            return ("--max-ttft", bound_s), ("none",)
        file, rights = self._scratch / "tenants.toml", {"adapters": ["*"], "slo_ttft": self._args.max_ttft}
        keys = [add_tenant(file, f"t{number}", rights) for number in range(NUM_TENANTS)]
        return ("--tenants", str(file)), keys


def measured(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Measure a setting's servers, without a bound and with it."""
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        servers = Servers(args, Path(scratch))
        with servers.run() as started:
            without = asyncio.run(unbounded(started.base_url, load=load, max_ttft_s=args.max_ttft))
        options, keys = servers.bound()
        with servers.run(*options) as started:
            rate = without["peak"]["rate"]
            bound = asyncio.run(
                bounded(started.base_url, rate=rate, load=load, max_ttft_s=args.max_ttft, keys=keys)
            )
    return {"unbounded": without, "bounded": bound, "ratio": ratio(without, bound)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=list(FILES), default="server")
    parser.add_argument("--max-ttft", type=float, default=1.0, help="seconds")
    parser.add_argument("--window-s", type=float, default=Load().window_s, help="seconds of each window")
    parser.add_argument("--replicas", type=int, default=1, help="of the fleet; each needs a core")
    parser.add_argument("--tiny", action="store_true", help="short windows: tries the script")
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--out", type=Path, help="default: a file of results/, nothing if --tiny")
    parser.add_argument("--loraplex", help="the loraplex program (default: beside this Python)")
    parser.add_argument("--server-options", default="--threads 1", help="further options of the server")
    args = parser.parse_args(argv)
    file = FILES[args.setting]
    load = Load(window_s=2.0, num_at_a_time=8, rounds=1) if args.tiny else Load(window_s=args.window_s)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    results = measured(args, load)
    print(f"goodput at {OVERLOAD:g}x the peak's rate: {results['ratio']:.1%} of the peak's; wanted 95%")
    soon = [each["refused_within_50_ms"] for each in results["bounded"]["overload"] if each["refused"]]
    print(f"refusals within 50 ms: {', '.join(f'{each:.1%}' for each in soon) or '-'}; wanted 95%")
    out = args.out or (None if args.tiny else RESULTS / file)
    if out is not None:
        parameters = {"max_ttft_s": args.max_ttft, "window_s": load.window_s, "rounds": load.rounds}
        document = environment() | {
            "sources": fingerprints(file),
            "parameters": parameters | {"server_options": server_options(args)},
            "results": results,
        }
        write_whole(out, json.dumps(document, indent=1) + "\n")
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
