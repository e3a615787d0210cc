"""Measure what the front of a fleet adds to the time to the first token and to the gaps between tokens.

    python -m benchmarks.fleet_front              # two minutes on a quiet machine

Replicas emit tokens at a set pace, and each token carries the time it was emitted (`paced_core`). A client in
its own process sends requests at a fixed rate and records when every token arrives. What it sees beyond the
pace was added by the front, the client and the machine they share. A single server and a fleet are measured
in turn, in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import numpy as np

from benchmarks.paced_core import FIRST_TOKEN_S, NUM_TIMES, PACE_S, age_s
from benchmarks.servers import ServerCommand, running
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.bench.load import run
from loraplex.core.whole_file import write_whole

FILE: Final = "fleet_front.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE
NUM_TOKENS: Final = 40
"""Tokens of a stream. At this pace it lasts two seconds: 100 requests/s are 200 open streams."""
SEED: Final = 0
_TOKEN: Final = re.compile(rb'"text":"([^"]*)"')
_END: Final = b"data: [DONE]"
_SPACE: Final = "Ġ"
"""Byte-level tokenizers' form of a space."""


@dataclass(kw_only=True)
class Seen:
    """Seconds beyond the pace: of first tokens, of tokens since their emission, of gaps between tokens."""

    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    def summary(self) -> dict[str, Any]:
        return {
            "requests": len(self.ttft_s),
            "failed": self.num_failed,
            "ttft_added_ms": _quantiles(self.ttft_s),
            "token_ms": _quantiles(self.token_s),
            "gap_added_ms": _quantiles(self.gap_s),
        }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    found = np.quantile(seconds, (0.5, 0.95, 0.99)) * 1e3
    return {name: round(float(value), 3) for name, value in zip(("p50", "p95", "p99"), found, strict=True)}


class Connection(asyncio.Protocol):
    """A connection that sends one request after the other and reads the stream of each. Minimal, as the
    client's CPU time is taken from the server, which has the same cores."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ages: list[float] = []
        self.first_s = 0.0
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._unread += data
        events, mark, rest = self._unread.rpartition(b"\n\n")
        if not mark:
            return
        self._unread = rest
        words = [word for text in _TOKEN.findall(events) for word in text.split()]
        if words and not self.ages:
            self.first_s = time.monotonic()
        self.ages += [age_s(int(word[1:])) for word in words]
        if _END in events:
            self.ended.set_result(None)

    async def answer(self, request: bytes, seen: Seen) -> None:
        """Send a request, wait for the end of its answer, and record its times."""
        assert self.transport is not None
        self.ended = asyncio.get_running_loop().create_future()
        self._unread, self.ages = b"", []
        sent_s = time.monotonic()
        self.transport.write(request)
        await self.ended
        if len(self.ages) != NUM_TOKENS:
            seen.num_failed += 1
            return
        seen.ttft_s.append(self.first_s - sent_s - FIRST_TOKEN_S)
        seen.token_s += self.ages
        seen.gap_s += np.diff(self.ages).tolist()


async def load(url: str, *, rate: float, duration_s: float) -> Seen:
    """Send requests at random intervals (Poisson), however many are still in flight: at equal intervals all
    streams would have their tokens at the same moments. Connections are reused."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    host, port = address.hostname, address.port
    body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    seen = Seen()
    idle: list[Connection] = []

    async def send() -> None:
        if idle:
            connection = idle.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, host, port)
        await connection.answer(request, seen)
        idle.append(connection)

    num_requests = int(rate * duration_s)
    arrivals_s = np.cumsum(np.random.default_rng(SEED).exponential(1 / rate, num_requests)).tolist()
    async with asyncio.TaskGroup() as requests:
        begun_s = time.monotonic()
        for arrival_s in arrivals_s:
            await asyncio.sleep(max(begun_s + arrival_s - time.monotonic(), 0.0))
            requests.create_task(send())
    for connection in idle:
        assert connection.transport is not None
        connection.transport.close()
    return seen


def serve_paced(model: Path, state_dir: Path, port: int, num_replicas: int) -> None:
    """Serve with paced cores in place of engines, like `loraplex fleet serve`."""
    from loraplex.core.logs import LogFormat, LogLevel, logging_to_stderr
    from loraplex.engine.options import EngineOptions
    from loraplex.server.options import ServeOptions
    from loraplex.server.run import serve

    options = ServeOptions(
        engine=EngineOptions(model=str(model), device="cpu"),
        served_model_name="base",
        port=port,
        state_dir=state_dir,
        num_replicas=num_replicas,
        engine_factory="benchmarks.paced_core:build_core",
    )
    with logging_to_stderr(LogLevel.WARNING.number, LogFormat.TEXT):
        serve(options)


def write_model(folder: Path) -> None:
    """Write a tokenizer whose words are the token ids, with the byte-level decoder of Llama 3 and Qwen, and a
    configuration; no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = {f"{_SPACE}w{token}": token for token in range(NUM_TIMES)}
    backend = Tokenizer(models.WordLevel(words, unk_token=f"{_SPACE}w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=NUM_TIMES,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
    ).save_pretrained(folder)


def measure(num_replicas: int, *, rate: float, duration_s: float, scratch: Path) -> dict[str, Any]:
    model = scratch / "model"
    if not model.exists():
        write_model(model)
    command = ServerCommand(
        args=(
            *(sys.executable, "-m", "benchmarks.fleet_front", "--model", str(model), "--port", "{port}"),
            *("--serve", str(num_replicas), "--state-dir", str(scratch / f"state-{num_replicas}")),
        )
    )
    with running(command, log_path=scratch / f"server-{num_replicas}.log") as server:
        run(load(server.base_url, rate=rate, duration_s=min(duration_s, 3.0)))  # a warm-up
        seen = run(load(server.base_url, rate=rate, duration_s=duration_s))
    return {"replicas": num_replicas, **seen.summary()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=100.0, help="requests/s")
    parser.add_argument("--duration-s", type=float, default=20.0)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    for name in ("--serve", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    for name in ("--model", "--state-dir"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve is not None:
        serve_paced(args.model, args.state_dir, args.port, args.serve)
        return
    results = []
    with tempfile.TemporaryDirectory(prefix="loraplex-front-") as scratch:
        for _ in range(args.rounds):
            for num_replicas in (1, args.replicas):
                found = measure(
                    num_replicas, rate=args.rate, duration_s=args.duration_s, scratch=Path(scratch)
                )
                results.append(found)
                print(json.dumps(found), flush=True)
    document = environment() | {
        "sources": fingerprints(FILE),
        "parameters": {
            "requests_per_s": args.rate,
            "arrivals": "Poisson",
            "duration_s": args.duration_s,
            "tokens": NUM_TOKENS,
            "pace_s": PACE_S,
            "first_token_s": FIRST_TOKEN_S,
        },
        "results": results,
    }
    write_whole(args.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
