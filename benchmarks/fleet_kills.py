"""Check that streams survive the replicas that serve them, by killing and stopping replicas.

    python -m benchmarks.fleet_kills --kills 200      # about 35 minutes on two cores

`loraplex fleet serve` runs three replicas of a small random model. Clients stream answers, greedy and seeded,
with and without adapters, penalties and log-probabilities, one after the other. New replicas join and leave;
then, repeatedly, a replica that serves streams is killed (SIGKILL) or stopped (SIGSTOP): first one at a
time, when all are back, then as soon as another one is ready. Then the same with a front of three servers,
whose connections are cut. Every answer is compared, token by token, with the one given before anything was
killed. Pauses are gaps between tokens of the streams that lost their replica: among all streams, as many as
it served, those with the longest gaps.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from benchmarks.cpu_serve import checkpoint
from benchmarks.cuttable import Cuttable
from benchmarks.make_checkpoint import Checkpoint
from benchmarks.servers import ServerCommand, running
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.whole_file import write_whole
from loraplex.server.engine_client import ClientOptions
from loraplex.server.restart_policy import RestartPolicy

FILE: Final = "fleet_kills.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE
NUM_REPLICAS: Final = 3
NUM_ADAPTERS: Final = 16
NUM_STREAMS: Final = 9
MAX_TOKENS: Final = 200
NUM_JOINS: Final = 10
SIGNALS: Final = (signal.SIGKILL, signal.SIGSTOP)
CUT: Final = "connections cut"
_LOOK_S: Final = 0.1
_READY_TIMEOUT_S: Final = 180.0
_BETWEEN_S: Final = 2.0
"""Seconds between two kills: streams that lost a replica may lose the next one too, but not always."""
ALONE, OVERLAPPING = NUM_REPLICAS, 2
"""Number of replicas that must be ready before one is killed."""
_ON_THE_WAY_S: Final = 1.0
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "greedy, penalties": {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "greedy, log-probabilities": {"temperature": 0, "logprobs": 2},
    "seeded": {"temperature": 1.0, "seed": 7},
    "seeded, top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 11},
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request and the name of its kind."""

    kind: str
    body: dict[str, Any]


@dataclass(kw_only=True)
class Answer:
    """The answer to a request. `error`: the type of the error that ended it; None if it finished."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    error: str | None = None

    def gap_s(self, at_s: float) -> float | None:
        """Return the longest gap between two tokens that ends after `at_s` and begins before or soon after,
        as tokens may still be in flight; None if there is none."""
        gaps = pairwise(self.times_s)
        return max((end - begin for begin, end in gaps if begin - _ON_THE_WAY_S < at_s < end), default=None)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A kill. `way`: how the replica was killed. `gaps_s`: gaps of all streams that were open."""

    way: str
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
    replaced_s: dict[str, list[float]] = field(default_factory=dict)
    joined_s: list[float] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        pauses_s: dict[str, list[float]] = {}
        for each in self.kills:
            pauses_s.setdefault(each.way, []).extend(each.pauses_s)
        return {
            "kills": dict(Counter(each.way for each in self.kills)),
            "answers": dict(self.ends),
            "wrong": self.wrong,
            "pauses": {way: len(each) for way, each in pauses_s.items()},
            "pause_s": {way: _quantiles(each) for way, each in pauses_s.items()},
            "replaced_s": {way: _quantiles(each) for way, each in self.replaced_s.items()},
            "joined_s": _quantiles(self.joined_s),
        }


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
    """Stream one answer after the other until `ended`, and check each."""
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


class Victims:
    """The replicas of a fleet, as candidates for a kill."""

    def __init__(self, session: aiohttp.ClientSession, url: str, least_ready: int) -> None:
        """`least_ready`: number of replicas that must be ready before one is killed."""
        self._session = session
        self._url = url
        self._least_ready = least_ready

    async def replicas(self) -> list[dict[str, Any]]:
        async with self._session.get(f"{self._url}/v1/fleet") as response:
            found: list[dict[str, Any]] = (await response.json())["data"]
            return found

    async def serving(self) -> list[dict[str, Any]]:
        """Return the replicas that serve streams, once enough are ready and one of them serves."""
        async with asyncio.timeout(_READY_TIMEOUT_S):
            while True:
                ready = [each for each in await self.replicas() if each["state"] == "ready"]
                serving = [each for each in ready if each["in_flight"]]
                if len(ready) >= self._least_ready and serving:
                    return serving
                await asyncio.sleep(_LOOK_S)

    async def join(self) -> float:
        """Add one replica and remove it again; return the seconds until the new one was ready."""
        began_s = time.monotonic()
        await self._scale(NUM_REPLICAS + 1)
        joined_s = time.monotonic() - began_s
        await self._scale(NUM_REPLICAS)
        return joined_s

    async def _scale(self, num_replicas: int) -> None:
        body = {"replicas": num_replicas, "move": True}
        async with self._session.post(f"{self._url}/v1/fleet/scale", json=body) as response:
            assert response.status == 200, await response.text()

    async def replaced(self, victim: Mapping[str, Any]) -> None:
        """Wait until another process serves in the replica's place."""
        async with asyncio.timeout(_READY_TIMEOUT_S):
            while True:
                now = (await self.replicas())[victim["replica"]]
                if now["state"] == "ready" and now["pid"] != victim["pid"]:
                    return
                await asyncio.sleep(_LOOK_S)


class Turns:
    """Limits how often a replica dies, so that it is not given up as broken (`RestartPolicy`)."""

    def __init__(self) -> None:
        self._policy = RestartPolicy()
        self._deaths_s: dict[int, list[float]] = {}

    def may_die(self, replica: int) -> bool:
        # A stopped replica is declared dead seconds later.
        since_s = time.monotonic() - self._policy.window_s - ClientOptions().lost_s
        recent = [each for each in self._deaths_s.get(replica, []) if each > since_s]
        return len(recent) < self._policy.max_crashes - 1

    def died(self, replica: int) -> None:
        self._deaths_s.setdefault(replica, []).append(time.monotonic())


async def kill(victims: Victims, num_kills: int, outcome: Outcome, cuts: Sequence[Cuttable]) -> None:
    """Kill replicas one after the other, by cutting their connections if there are `cuts`, else by each
    signal in turn."""
    rng, turns = random.Random(0), Turns()
    async with asyncio.TaskGroup() as replacing:
        for number in range(num_kills):
            await victims.serving()
            await asyncio.sleep(rng.random())  # a random point of their answers
            while not (able := [each for each in await victims.serving() if turns.may_die(each["replica"])]):
                await asyncio.sleep(_LOOK_S)
            victim = rng.choice(able)
            at_s = time.monotonic()
            if cuts:
                way = CUT
                cuts[victim["replica"]].cut()
            else:
                way = SIGNALS[number % len(SIGNALS)].name
                os.kill(victim["pid"], SIGNALS[number % len(SIGNALS)])
                turns.died(victim["replica"])
                replacing.create_task(_time_replacement(victims, victim, way, at_s, outcome))
            outcome.kills.append(Kill(way=way, at_s=at_s, num_streams=victim["in_flight"]))
            print(f"{number + 1}/{num_kills} {way}: {dict(outcome.ends)}", flush=True)
            await asyncio.sleep(_BETWEEN_S)


async def _time_replacement(
    victims: Victims, victim: Mapping[str, Any], way: str, at_s: float, outcome: Outcome
) -> None:
    await victims.replaced(victim)
    outcome.replaced_s.setdefault(way, []).append(time.monotonic() - at_s)


async def disturb(
    url: str,
    num_kills: int,
    expected: dict[str, list[int]],
    *,
    least_ready: int,
    num_joins: int = 0,
    cuts: Sequence[Cuttable] = (),
) -> Outcome:
    """Run streams while replicas are killed; return the outcome. `expected`: undisturbed answers by request;
    missing ones are requested first. `num_joins`: how often a new replica joins before any is killed."""
    outcome, ended = Outcome(), asyncio.Event()
    asked = requests()
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for each in asked:
            if _key(each) not in expected:
                answer = await ask(session, url, each)
                assert answer.error is None, answer.error
                expected[_key(each)] = answer.token_ids
        turns = _turns(asked)
        streams = [
            asyncio.create_task(stream_for_ever(session, url, turns, expected, outcome, ended))
            for _ in range(NUM_STREAMS)
        ]
        try:
            victims = Victims(session, url, least_ready)
            outcome.joined_s = [await victims.join() for _ in range(num_joins)]
            await kill(victims, num_kills, outcome, cuts)
        finally:
            ended.set()
            await asyncio.gather(*streams)
    return outcome


def _turns(asked: Sequence[Asked]) -> Iterator[Asked]:
    rng = random.Random(1)
    while True:
        yield rng.choice(asked)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings that all fleets of a run share."""

    served: Checkpoint
    scratch: Path
    logs: Path

    def command(self, name: str, *args: str) -> ServerCommand:
        program = str(Path(sys.executable).with_name("loraplex"))
        model = ("--model", str(self.served.base), "--served-model-name", "base")
        adapters = ("--adapters", str(self.served.adapters))
        where = ("--port", "{port}", "--state-dir", str(self.scratch / name))
        return ServerCommand(args=(program, *args, *model, *adapters, *where))


_ENGINE: Final = ("--dtype", "float32", "--threads", "1", "--kv-memory", "256MiB")


async def kill_processes(
    setting: Setting, num_kills: int, expected: dict[str, list[int]], least_ready: int
) -> Outcome:
    """Kill and stop the engine processes of a fleet."""
    args = ("fleet", "serve", "--replicas", str(NUM_REPLICAS), *_ENGINE)
    command = setting.command(f"fleet-{least_ready}", *args)
    with running(command, log_path=setting.logs / "fleet-kills.log") as server:
        joins = NUM_JOINS if least_ready == ALONE else 0
        return await disturb(server.base_url, num_kills, expected, least_ready=least_ready, num_joins=joins)


async def cut_connections(setting: Setting, num_kills: int, expected: dict[str, list[int]]) -> Outcome:
    """Cut the connections between a front and the servers behind it."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_context
        cuts, addresses = [], []
        for number in range(NUM_REPLICAS):
            command = setting.command(f"server-{number}", "serve", *_ENGINE)
            server = enter(running(command, log_path=setting.logs / f"fleet-cuts-{number}.log"))
            cuts.append(Cuttable(server.base_url))
            addresses.append(await cuts[-1].start())
            stack.push_async_callback(cuts[-1].close)
        backends = [part for address in addresses for part in ("--backend", address)]
        front = running(
            setting.command("front", "fleet", "serve", *backends), log_path=setting.logs / "fleet-cuts.log"
        )
        # In a thread: the front connects to the servers through this process while it starts.
        server = await asyncio.to_thread(enter, front)
        return await disturb(server.base_url, num_kills, expected, least_ready=OVERLAPPING, cuts=cuts)


async def measure(setting: Setting, num_kills: int) -> dict[str, Any]:
    expected: dict[str, list[int]] = {}
    third = num_kills // 3
    parts = {
        "alone": await kill_processes(setting, num_kills - 2 * third, expected, ALONE),
        "overlapping": await kill_processes(setting, third, expected, OVERLAPPING),
        "servers": await cut_connections(setting, third, expected),
    }
    return {name: outcome.summary() for name, outcome in parts.items()}


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
        setting = Setting(served=served, scratch=Path(scratch), logs=args.work_dir)
        found = asyncio.run(measure(setting, args.kills))
    document = here | {
        "parameters": {
            "kills": args.kills,
            "replicas": NUM_REPLICAS,
            "streams": NUM_STREAMS,
            "tokens": MAX_TOKENS,
        },
        **found,
    }
    write_whole(args.out, json.dumps(document, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = np.quantile(seconds, (0.5, 0.95, 1.0))
    return {name: round(float(value), 3) for name, value in zip(("p50", "p95", "max"), found, strict=True)}


if __name__ == "__main__":
    main()
