"""Do streams survive the replicas that serve them? Replicas are killed or stopped under streams.

    python -m benchmarks.fleet_kills --kills 200      # about 40 minutes on two cores

`loraplex fleet serve` runs three replicas of a small random model. Clients stream answers, greedy and seeded,
with and without adapters, penalties and log-probabilities, one after the other. Again and again a replica
that serves streams is killed (SIGKILL) or stopped (SIGSTOP), and the next one's turn comes when the fleet is
whole again. Every answer is held against the one that was given before anything was killed, token by token.
Pauses are gaps between tokens of the streams that lost their replica: of all streams as many as it served,
those with the longest gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from benchmarks.cpu_serve import checkpoint
from benchmarks.servers import ServerCommand, running
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.whole_file import write_whole

FILE: Final = "fleet_kills.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE
NUM_REPLICAS: Final = 3
NUM_ADAPTERS: Final = 16
NUM_STREAMS: Final = 9
MAX_TOKENS: Final = 300
SIGNALS: Final = (signal.SIGKILL, signal.SIGSTOP)
_LOOK_S: Final = 0.1
_WHOLE_TIMEOUT_S: Final = 180.0
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "greedy, penalties": {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "greedy, log-probabilities": {"temperature": 0, "logprobs": 2},
    "seeded": {"temperature": 1.0, "seed": 7},
    "seeded, top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 11},
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, by the name of its kind."""

    kind: str
    body: dict[str, Any]


@dataclass(kw_only=True)
class Answer:
    """What came of a request. `error`: the type of the error that ended it; None if it ended by itself."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    error: str | None = None

    def gap_s(self, at_s: float) -> float | None:
        """Return the longest gap between two tokens that ends after `at_s`; None if there is none."""
        later = [end - begin for begin, end in pairwise(self.times_s) if end > at_s]
        return max(later, default=None)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """`gaps_s`: of all streams that were open."""

    at_s: float
    num_streams: int
    gaps_s: list[float] = field(default_factory=list)

    @property
    def pauses_s(self) -> list[float]:
        return sorted(self.gaps_s)[-self.num_streams :]


@dataclass(kw_only=True)
class Outcome:
    ends: Counter[str] = field(default_factory=Counter)
    kills: list[Kill] = field(default_factory=list)
    whole_again_s: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[dict[str, Any]] = field(default_factory=list)


def requests() -> list[Asked]:
    models = ["base", *(f"lora-{number:04d}" for number in (0, 5, 9))]
    return [
        Asked(
            kind=kind,
            body={
                "model": model,
                "prompt": [3 + index, 5, 7, 11],
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
                **fields,
            },
        )
        for index, (kind, fields) in enumerate(_KINDS.items())
        for model in models
    ]


async def ask(session: aiohttp.ClientSession, url: str, asked: Asked) -> Answer:
    answer = Answer()
    async with session.post(f"{url}/v1/completions", json=asked.body) as response:
        if response.status != 200:
            answer.error = (await response.json())["error"]["type"]
            return answer
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = event["error"]["type"]
            for choice in event.get("choices", ()):
                if ids := choice.get("token_ids"):
                    answer.token_ids += ids
                    answer.times_s.append(time.monotonic())
    return answer


async def stream_for_ever(
    session: aiohttp.ClientSession,
    url: str,
    turns: Iterator[Asked],
    expected: dict[str, list[int]],
    outcome: Outcome,
    ended: asyncio.Event,
) -> None:
    """Stream one answer after the other until `ended`, and judge each."""
    while not ended.is_set():
        asked = next(turns)
        began_s = time.monotonic()
        answer = await ask(session, url, asked)
        if answer.error is not None:
            outcome.ends[f"error: {answer.error}"] += 1
        elif answer.token_ids == expected[_key(asked)]:
            outcome.ends["as undisturbed"] += 1
        else:
            outcome.ends["other tokens"] += 1
            outcome.wrong.append(
                {
                    "kind": asked.kind,
                    "model": asked.body["model"],
                    **_difference(answer.token_ids, expected[_key(asked)]),
                }
            )
        for each in outcome.kills:
            if began_s <= each.at_s and (gap_s := answer.gap_s(each.at_s)) is not None:
                each.gaps_s.append(gap_s)


def _key(asked: Asked) -> str:
    return json.dumps(asked.body, sort_keys=True)


def _difference(got: Sequence[int], expected: Sequence[int]) -> dict[str, int]:
    same = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), -1)
    return {"tokens": len(got), "expected_tokens": len(expected), "first_difference": same}


async def kill(session: aiohttp.ClientSession, url: str, num_kills: int, outcome: Outcome) -> None:
    """End a replica that serves streams, by each signal in turn; wait until the fleet is whole again."""
    rng = random.Random(0)
    for number in range(num_kills):
        chosen = SIGNALS[number % len(SIGNALS)]
        serving = [each for each in await _whole(session, url) if each["in_flight"]]
        await asyncio.sleep(rng.random())  # anywhere in their answers
        victim = rng.choice(serving)
        killed_s = time.monotonic()
        os.kill(victim["pid"], chosen)
        outcome.kills.append(Kill(at_s=killed_s, num_streams=victim["in_flight"]))
        await _gone(session, url, victim["replica"], victim["pid"])
        await _whole(session, url)
        took_s = time.monotonic() - killed_s
        outcome.whole_again_s.setdefault(chosen.name, []).append(took_s)
        print(
            f"kill {number + 1}/{num_kills} {chosen.name}: {took_s:.1f} s, {dict(outcome.ends)}", flush=True
        )


async def _replicas(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with session.get(f"{url}/v1/fleet") as response:
        found: list[dict[str, Any]] = (await response.json())["data"]
        return found


async def _gone(session: aiohttp.ClientSession, url: str, number: int, pid: int) -> None:
    async with asyncio.timeout(_WHOLE_TIMEOUT_S):
        while (await _replicas(session, url))[number]["pid"] == pid:
            await asyncio.sleep(_LOOK_S)


async def _whole(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """Return the replicas when all are ready, and some serve streams."""
    async with asyncio.timeout(_WHOLE_TIMEOUT_S):
        while True:
            found = await _replicas(session, url)
            if all(each["state"] == "ready" for each in found) and any(each["in_flight"] for each in found):
                return found
            await asyncio.sleep(_LOOK_S)


async def disturb(url: str, num_kills: int) -> Outcome:
    outcome, ended = Outcome(), asyncio.Event()
    asked = requests()
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        expected = {}
        for each in asked:
            answer = await ask(session, url, each)
            assert answer.error is None, answer.error
            expected[_key(each)] = answer.token_ids
        turns = _turns(asked)
        streams = [
            asyncio.create_task(stream_for_ever(session, url, turns, expected, outcome, ended))
            for _ in range(NUM_STREAMS)
        ]
        try:
            await kill(session, url, num_kills, outcome)
        finally:
            ended.set()
            await asyncio.gather(*streams)
    return outcome


def _turns(asked: Sequence[Asked]) -> Iterator[Asked]:
    rng = random.Random(1)
    while True:
        yield rng.choice(asked)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    served = checkpoint(args.work_dir.resolve() / f"checkpoint-{NUM_ADAPTERS}", num_adapters=NUM_ADAPTERS)
    here = environment() | {"sources": fingerprints(FILE)}
    with tempfile.TemporaryDirectory(prefix="loraplex-kills-") as scratch:
        command = ServerCommand(
            args=(
                *(
                    str(Path(sys.executable).with_name("loraplex")),
                    "fleet",
                    "serve",
                    "--replicas",
                    str(NUM_REPLICAS),
                ),
                *("--model", str(served.base), "--served-model-name", "base"),
                *("--adapters", str(served.adapters), "--dtype", "float32", "--threads", "1"),
                *("--port", "{port}", "--state-dir", scratch),
            )
        )
        with running(command, log_path=args.work_dir / "fleet-kills.log") as server:
            outcome = asyncio.run(disturb(server.base_url, args.kills))
    pauses_s = [pause_s for each in outcome.kills for pause_s in each.pauses_s]
    document = here | {
        "parameters": {
            "kills": args.kills,
            "replicas": NUM_REPLICAS,
            "streams": NUM_STREAMS,
            "tokens": MAX_TOKENS,
        },
        "answers": dict(outcome.ends),
        "wrong": outcome.wrong,
        "pause_s": _quantiles(pauses_s),
        "streams_disturbed": len(pauses_s),
        "whole_again_s": {name: _quantiles(each) for name, each in outcome.whole_again_s.items()},
    }
    write_whole(args.out, json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: value for key, value in document.items() if key != "sources"}, indent=1))


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = np.quantile(seconds, (0.5, 0.95, 1.0))
    return {name: round(float(value), 3) for name, value in zip(("p50", "p95", "max"), found, strict=True)}


if __name__ == "__main__":
    main()
