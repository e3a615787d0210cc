"""Measure whether one request holds up another: streams and /health probes beside huge, many or vanishing
ones.

    python -m benchmarks.holdups                  # about five minutes on two cores

A server with a small random model serves a few long streams. For each disturbance, windows without and with
it take turns. Reported are the p99 of /health, and the streams' gaps with the disturbance over those without
it: ratios within one run, since the machine may be shared. The disturbing client is a separate process, whose
requests are made before the window begins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from benchmarks import engines
from benchmarks.cpu_serve import checkpoint
from benchmarks.servers import RunningServer, running
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.whole_file import write_whole

RESULTS: Final = Path(__file__).parent / "results" / "holdups.json"
NUM_STREAMS: Final = 4
STREAM_TOKENS: Final = 1500
HEALTH_INTERVAL_S: Final = 0.02
WINDOW_S: Final = 5.0
NUM_QUEUED: Final = 2000
NUM_DISCONNECTS: Final = 300
MODEL: Final = "lora-0000"


def _chat(messages: list[dict[str, str]]) -> tuple[str, bytes]:
    return "/v1/chat/completions", json.dumps(
        {"model": MODEL, "messages": messages, "max_tokens": 1}
    ).encode()


def _completion(prompt: Any, **fields: Any) -> tuple[str, bytes]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields}
    return "/v1/completions", json.dumps(body).encode()


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth - 1):
        found = [found]
    return found


LARGE: Final[dict[str, Callable[[], tuple[str, bytes]]]] = {
    "100,000 empty messages": lambda: _chat([{"role": "user", "content": ""}] * 100_000),
    "one message of 3.6 MB": lambda: _chat([{"role": "user", "content": "the cat sat " * 300_000}]),
    "100,000 prompts": lambda: _completion(["x"] * 100_000),
    "/tokenize of 3.6 MB": lambda: (
        "/tokenize",
        json.dumps({"prompt": "the cat sat " * 300_000}).encode(),
    ),
    "/tokenize of 900 kB": lambda: ("/tokenize", json.dumps({"prompt": "the cat sat " * 75_000}).encode()),
    "2,048 choices with long stop strings": lambda: _completion(
        ["hi"] * 16, n=128, stop=["a" * 1023 + letter for letter in "abcdefghijklmnop"]
    ),
    "two million lists": lambda: _completion("hi", metadata={"a": [_nested(400)] * 5000}),
    "4 MB that are no JSON": lambda: ("/v1/completions", b":" * (4 * 2**20 - 1)),
    "a text of 4 MB without its end": lambda: (
        "/v1/completions",
        b'{"model": "lora-0000", "prompt": "' + b"the cat " * (2**19 - 8),
    ),
    "/detokenize of a million ids": lambda: (
        "/detokenize",
        json.dumps({"tokens": [7] * 1_000_000}).encode(),
    ),
}
"""Single large requests: name -> path and body."""


BASELINES: Final = {
    "2,000 requests at once": "256 requests at a time",
    "300 streams vanish at once": "300 streams",
}
"""Baselines of disturbances whose requests are work for the engine themselves: the same requests, but none of
them queued, or none that vanishes."""


@dataclass(kw_only=True)
class Window:
    """Observations during a window, in seconds."""

    gaps_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)

    def add(self, other: Window) -> None:
        self.gaps_s += other.gaps_s
        self.health_s += other.health_s

    def summary(self) -> dict[str, float]:
        return {
            "gap_mean_ms": 1e3 * statistics.fmean(self.gaps_s),
            "gap_p99_ms": 1e3 * _percentile(self.gaps_s, 0.99),
            "gap_max_ms": 1e3 * max(self.gaps_s),
            "health_p50_ms": 1e3 * _percentile(self.health_s, 0.5),
            "health_p99_ms": 1e3 * _percentile(self.health_s, 0.99),
            "health_max_ms": 1e3 * max(self.health_s),
        }


class Observer:
    """Long streams and probes of /health that run all the time, and what was observed in a window."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._window: Window | None = None

    async def watch(self, seconds: float) -> Window:
        """Return the observations of the next `seconds`."""
        window = self._window = Window()
        await asyncio.sleep(seconds)
        self._window = None
        return window

    async def stream(self, session: aiohttp.ClientSession, seed: int) -> None:
        """Run one stream after the other; the gap between two streams does not count."""
        _, body = _completion(
            [3 + seed, 5, 7], max_tokens=STREAM_TOKENS, stream=True, ignore_eos=True, temperature=0
        )
        while True:
            async with session.post(f"{self._base_url}/v1/completions", data=body) as response:
                assert response.status == 200, await response.text()
                last_s = None
                async for _ in response.content.iter_any():
                    now_s = time.perf_counter()
                    if self._window is not None and last_s is not None:
                        self._window.gaps_s.append(now_s - last_s)
                    last_s = now_s

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """Probe /health at fixed times, whether or not earlier probes were answered: a standstill counts for
        every probe that falls into it."""
        async with asyncio.TaskGroup() as probes:
            due_s = time.perf_counter()
            while True:
                probes.create_task(self._probe_once(session, due_s))
                due_s += HEALTH_INTERVAL_S
                await asyncio.sleep(due_s - time.perf_counter())

    async def _probe_once(self, session: aiohttp.ClientSession, due_s: float) -> None:
        window = self._window
        async with session.get(f"{self._base_url}/health") as response:
            await response.read()
        if window is not None:
            window.health_s.append(time.perf_counter() - due_s)


# ---- the disturbing process


def disturb(base_url: str, orders: Connection) -> None:
    """Serve commands: the name of a disturbance to prepare, then anything to start it; answers when it is
    over."""
    asyncio.run(_disturb(base_url, orders))


async def _disturb(base_url: str, orders: Connection) -> None:
    loop = asyncio.get_running_loop()
    while (name := await loop.run_in_executor(None, orders.recv)) is not None:
        act = _prepare(base_url, name)
        orders.send("ready")
        await loop.run_in_executor(None, orders.recv)
        orders.send(await act())


def _prepare(base_url: str, name: str) -> Callable[[], Any]:
    if name in LARGE:
        path, body = LARGE[name]()
        return lambda: _send_large(base_url, path, body)
    acts: dict[str, Callable[[], Any]] = {
        "2,000 requests at once": lambda: _send_many(base_url, at_once=NUM_QUEUED),
        "256 requests at a time": lambda: _send_many(base_url, at_once=256),
        "300 streams vanish at once": lambda: _stream_and(base_url, vanish=True),
        "300 streams": lambda: _stream_and(base_url, vanish=False),
    }
    return acts[name]


async def _send_large(base_url: str, path: str, body: bytes) -> dict[str, Any]:
    """Send the same large request a few times, one after the other."""
    statuses = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for _ in range(3):
            async with session.post(base_url + path, data=body) as response:
                await response.read()
                statuses.append(response.status)
    return {"statuses": statuses}


async def _send_many(base_url: str, *, at_once: int) -> dict[str, Any]:
    """Send 2,000 short requests, all at once or fewer at a time: the same work for the engine."""
    path, body = _completion([11] * 8, max_tokens=8)
    places = asyncio.Semaphore(at_once)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def send() -> int:
            async with places, session.post(base_url + path, data=body) as response:
                await response.read()
                return response.status

        statuses = await asyncio.gather(*(send() for _ in range(NUM_QUEUED)))
    return {"statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))}}


async def _stream_and(base_url: str, *, vanish: bool) -> dict[str, Any]:
    """Open streams that are all closed at once, as soon as all have their headers, or read to the end."""
    address = urlsplit(base_url)
    assert address.hostname is not None
    path, body = _completion([13] * 8, max_tokens=16, stream=True)
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(NUM_DISCONNECTS):
        connection = socket.socket()
        connection.setblocking(False)
        await loop.sock_connect(connection, (address.hostname, address.port))
        await loop.sock_sendall(connection, head + body)
        connections.append(connection)
    for connection in connections:
        await loop.sock_recv(connection, 1)
        while not vanish and b"[DONE]" not in await loop.sock_recv(connection, 65536):
            pass
    for connection in connections:
        connection.close()
    return {"vanished": len(connections) if vanish else 0}


# ---- the measurement


async def measure(server: RunningServer, names: Sequence[str], rounds: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=disturb, args=(server.base_url, theirs), daemon=True)
    process.start()
    observer = Observer(server.base_url)
    loop = asyncio.get_running_loop()
    results: dict[str, Any] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        background = [asyncio.create_task(observer.stream(session, seed)) for seed in range(NUM_STREAMS)]
        background.append(asyncio.create_task(observer.probe(session)))
        try:
            await asyncio.sleep(2 * WINDOW_S)
            for name in names:
                calm, disturbed, outcomes = Window(), Window(), []
                for _ in range(rounds):
                    for window, act in ((calm, BASELINES.get(name)), (disturbed, name)):
                        if act is not None:
                            ours.send(act)
                            assert await loop.run_in_executor(None, ours.recv) == "ready"
                            ours.send("begin")
                        window.add(await observer.watch(WINDOW_S))
                        if act is not None:
                            outcome = await loop.run_in_executor(None, ours.recv)
                            outcomes += [outcome] if act == name else []
                        await asyncio.sleep(1.0)
                results[name] = _compare(calm, disturbed) | {"outcomes": outcomes}
                results[name]["server_rss_mib"] = round(_rss_mib(server.pid))
                print(f"{name:32} {json.dumps(results[name])}", flush=True)
        finally:
            for task in background:
                task.cancel()
            failed = await asyncio.gather(*background, return_exceptions=True)
            process.terminate()
    assert all(isinstance(end, asyncio.CancelledError) for end in failed), failed
    return results


def _compare(calm: Window, disturbed: Window) -> dict[str, Any]:
    before, during = calm.summary(), disturbed.summary()
    return {
        "calm": {key: round(value, 2) for key, value in before.items()},
        "disturbed": {key: round(value, 2) for key, value in during.items()},
        "gap_mean_ratio": round(during["gap_mean_ms"] / before["gap_mean_ms"], 3),
        "gap_p99_ratio": round(during["gap_p99_ms"] / before["gap_p99_ms"], 3),
    }


def _percentile(values: Sequence[float], fraction: float) -> float:
    return sorted(values)[min(int(fraction * len(values)), len(values) - 1)]


def _rss_mib(pid: int) -> float:
    """Return the memory of the HTTP process, which is the one that was started."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*LARGE, "2,000 requests at once", "300 streams vanish at once"]
    parser.add_argument("--only", choices=names, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--loraplex", help="the loraplex program (default: beside this Python)")
    parser.add_argument("--server-options", default="", help="further options of `loraplex serve`")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    served = checkpoint(args.work_dir.resolve() / "checkpoint-16", num_adapters=16)
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        engine = engines.loraplex(
            served, state_dir=Path(scratch), program=args.loraplex, extra=tuple(args.server_options.split())
        )
        with running(engine.command, log_path=args.work_dir / "holdups.log") as server:
            rss_before = _rss_mib(server.pid)
            results = asyncio.run(measure(server, args.only or names, args.rounds))
            rss_after = _rss_mib(server.pid)
    result = environment() | {
        "sources": fingerprints("holdups.json"),
        "parameters": {"streams": NUM_STREAMS, "window_s": WINDOW_S, "rounds": args.rounds},
        "server_options": args.server_options,
        "rss_mib": {"at_start": round(rss_before), "at_end": round(rss_after)},
        "disturbances": results,
    }
    write_whole(args.out, json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
