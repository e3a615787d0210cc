"""Measure how closely tenants are held to their limits per minute: a real server, over HTTP.

    python -m benchmarks.quotas                   # five minutes

Tenants with limits on requests, on tokens and on both ask at random times (Poisson) for twice as much as they
may, each with its own key. What they were served, by the answers' `usage`, is compared with their limits.
The model is small, so that the server keeps up: the answers of a queue of minutes would be counted here, and
against the next minutes' limits by the server.
`--tiny` tests the script itself in seconds, and writes nothing without --out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from benchmarks import engines
from benchmarks.cpu_serve import checkpoint
from benchmarks.make_checkpoint import SMALL, adapter_name
from benchmarks.servers import running
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.whole_file import write_whole
from loraplex.server.tenants.tenants_edit import add_tenant

FILE: Final = "quotas.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE
NUM_ADAPTERS: Final = 16
OVER: Final = 2.0
"""Each tenant asks for so many times its limit."""
WINDOW_S: Final = 60.1
"""Seconds after which what was used has expired (`loraplex.server.tenants.minute_window`)."""
NUM_WINDOWS: Final = 5
LAST_SHARE: Final = 0.75
"""Share of the last window in which tenants ask. They have used their limits by then, and what a busy machine
delays does not reach the next window."""
GUESSED_TOKENS: Final = 64
"""Tokens that a request is taken to have, for the rate at which a tenant with a limit on tokens asks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A tenant's limits. `prompt_tokens`, `output_tokens`: most of its requests."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    prompt_tokens: int = 16
    output_tokens: int = 4

    @property
    def limits(self) -> dict[str, int]:
        named = {
            "requests_per_minute": self.requests_per_minute,
            "tokens_per_minute": self.tokens_per_minute,
        }
        return {name: limit for name, limit in named.items() if limit is not None}

    @property
    def requests_per_s(self) -> float:
        """Requests that it asks for: enough to reach all of its limits."""
        by_tokens = (self.tokens_per_minute or 0) / GUESSED_TOKENS
        return OVER * max(self.requests_per_minute or 0, by_tokens) / 60


TENANTS: Final = (
    Asked(name="few-requests", requests_per_minute=60),
    Asked(name="more-requests", requests_per_minute=240),
    Asked(name="few-tokens", tokens_per_minute=3_000, prompt_tokens=100, output_tokens=48),
    Asked(name="more-tokens", tokens_per_minute=9_000, prompt_tokens=100, output_tokens=48),
    Asked(
        name="both",
        requests_per_minute=60,
        tokens_per_minute=3_000,
        prompt_tokens=150,
        output_tokens=48,
    ),
)


@dataclass(slots=True)
class Served:
    """Counts of what a tenant got so far. `statuses`: of its requests that were neither answered nor
    refused."""

    asked: int = 0
    answered: int = 0
    tokens: int = 0
    refused: int = 0
    statuses: tuple[int, ...] = ()


async def ask(session: aiohttp.ClientSession, url: str, tenant: Asked, key: str, seconds: float) -> Served:
    """Send a tenant's requests for so many seconds; return what became of them."""
    rng, served = random.Random(tenant.name), Served()
    begun_s = due_s = time.perf_counter()

    async def send() -> None:
        body = {
            "model": adapter_name(rng.randrange(NUM_ADAPTERS)),
            "prompt": [rng.randint(3, 4000) for _ in range(rng.randint(1, tenant.prompt_tokens))],
            "max_tokens": rng.randint(1, tenant.output_tokens),
            "ignore_eos": True,
        }
        served.asked += 1
        headers = {"authorization": f"Bearer {key}"}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            answer = await response.json()
        if response.status == 200:
            served.answered += 1
            served.tokens += answer["usage"]["total_tokens"]
        elif response.status == 429:
            served.refused += 1
        else:
            served.statuses += (response.status,)

    async with asyncio.TaskGroup() as requests:
        while (due_s := due_s + rng.expovariate(tenant.requests_per_s)) < begun_s + seconds:
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            requests.create_task(send())
    return served


def compared(tenant: Asked, served: Served, num_windows: float) -> dict[str, Any]:
    """Return a tenant's figures. `of_limit`: what it was served over the limit that it reached; the nearest
    one."""
    used = {"requests_per_minute": served.answered, "tokens_per_minute": served.tokens}
    of_limits = {name: used[name] / (limit * num_windows) for name, limit in tenant.limits.items()}
    reached = max(of_limits, key=lambda name: of_limits[name])
    return {
        "limits": tenant.limits,
        "asked": served.asked,
        "answered": served.answered,
        "refused": served.refused,
        "failed": list(served.statuses),
        "tokens": served.tokens,
        "reached": reached,
        "of_limit": round(of_limits[reached], 4),
    }


async def measured(url: str, keys: Sequence[str], seconds: float) -> list[Served]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        asking = [ask(session, url, tenant, key, seconds) for tenant, key in zip(TENANTS, keys, strict=True)]
        return list(await asyncio.gather(*asking))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a few seconds: tries the script")
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--out", type=Path, help=f"default: results/{FILE}, nothing if --tiny")
    parser.add_argument("--loraplex", help="the loraplex program (default: beside this Python)")
    args = parser.parse_args(argv)
    num_windows = 4.0 / WINDOW_S if args.tiny else NUM_WINDOWS
    seconds = 4.0 if args.tiny else (NUM_WINDOWS - 1 + LAST_SHARE) * WINDOW_S
    args.work_dir.mkdir(parents=True, exist_ok=True)
    served_model = checkpoint(
        args.work_dir.resolve() / "checkpoint-small", num_adapters=NUM_ADAPTERS, size=SMALL
    )
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        file = Path(scratch) / "tenants.toml"
        keys = [add_tenant(file, each.name, {"adapters": ["*"], **each.limits}) for each in TENANTS]
        engine = engines.loraplex(
            served_model,
            state_dir=Path(scratch),
            program=args.loraplex,
            extra=("--threads", "1", "--tenants", str(file)),
        )
        with running(engine.command, log_path=args.work_dir / "quotas.log") as started:
            found = asyncio.run(measured(started.base_url, keys, seconds))
    rows = zip(TENANTS, found, strict=True)
    results = {each.name: compared(each, served, num_windows) for each, served in rows}
    for name, row in results.items():
        print(f"{name}: {json.dumps(row)}", flush=True)
    out = args.out or (None if args.tiny else RESULTS)
    if out is not None:
        document = environment() | {
            "sources": fingerprints(FILE),
            "parameters": {"seconds": seconds, "over": OVER},
            "results": results,
        }
        write_whole(out, json.dumps(document, indent=1) + "\n")
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
