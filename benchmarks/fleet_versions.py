"""Check that a fleet answers with the promised version while adapters and replicas change.

    python -m benchmarks.fleet_versions --requests 100000      # about 15 minutes on two cores

`loraplex fleet serve` runs three replicas of a tiny random model. Clients request greedy answers of adapters
and of the base model, streamed and not. Meanwhile adapters are loaded, reloaded with other versions, tried as
canaries, promoted, rolled back and unloaded; replicas are drained, replaced, added, removed and killed
(SIGKILL); adapters are placed again every few seconds; and the files of some adapters are overwritten before
each reload. Every answer must be of a version that its name stood for between its sending and its headers
(`version_promises`), must name the same version in its header, its usage and its line of the log, and have
the tokens that transformers and PEFT compute with that version (`version_checkpoint`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.servers import ServerCommand, running
from benchmarks.sources import fingerprints
from benchmarks.version_changes import (
    Fleet,
    Rollouts,
    change_replicas,
    error_of,
    kill_replicas,
    list_again_and_again,
)
from benchmarks.version_checkpoint import LONG_TOKENS, SHORT_TOKENS, VersionCheckpoint, version_checkpoint
from benchmarks.version_promises import Answer, Judge
from loraplex.bench.environment import ENGINE_PACKAGES, environment
from loraplex.core.whole_file import write_whole

FILE: Final = "fleet_versions.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE
BASE: Final = "base"
_VERSION: Final = "X-Loraplex-Adapter-Version"
_NUM_USERS: Final = 200
_PROGRESS_S: Final = 10.0
_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of one run. `max_minutes`: time after which no more requests are sent. `overwritten`: number
    of adapters whose versions share one folder. `host_adapter_memory`: of a replica, less than all adapters
    take, so that they are loaded repeatedly."""

    requests: int = 100_000
    max_minutes: float = 120.0
    replicas: int = 3
    clients: int = 16
    changers: int = 2
    adapters: int = 24
    versions: int = 4
    overwritten: int = 2
    kill_every_s: float = 15.0
    change_replicas_every_s: float = 15.0
    placement_period_s: float = 5.0
    host_adapter_memory: str = "512KiB"


TINY: Final = Setting(
    requests=300,
    replicas=2,
    clients=8,
    adapters=3,
    versions=2,
    overwritten=1,
    kill_every_s=2.0,
    change_replicas_every_s=1.0,
    placement_period_s=1.0,
)


class Load:
    """The requests of all clients, in the order in which they are sent. The popularity of adapters follows
    Zipf's law; one request in twenty is for the base model."""

    def __init__(self, served: VersionCheckpoint, num_requests: int) -> None:
        self._names = list(served.versions)
        self._weights = list(accumulate(1 / (rank + 1) for rank in range(len(self._names))))
        self._num_prompts = len(served.prompts)
        self._requests = self._make(num_requests)

    def name(self, rng: random.Random) -> str:
        return rng.choices(self._names, cum_weights=self._weights)[0]

    def take(self) -> Answer | None:
        """Return the next request, without its answer; None if there are no more."""
        return next(self._requests, None)

    def _make(self, num_requests: int) -> Iterator[Answer]:
        rng = random.Random(0)
        for number in range(num_requests):
            request_id = f"request-{number}"
            yield Answer(
                request_id=request_id,
                name=None if rng.random() < 0.05 else self.name(rng),
                key=f"user-{rng.randrange(_NUM_USERS)}" if rng.random() < 0.5 else request_id,
                prompt=rng.randrange(self._num_prompts),
                num_tokens=LONG_TOKENS if rng.random() < 0.1 else SHORT_TOKENS,
                is_stream=rng.random() < 0.5,
                sent_s=time.monotonic(),
            )


async def ask(session: aiohttp.ClientSession, url: str, answer: Answer, prompt: Sequence[int]) -> None:
    """Send a request, and fill in its answer."""
    body: dict[str, Any] = {
        "model": answer.name or BASE,
        "prompt": prompt,
        "max_tokens": answer.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": answer.is_stream,
    }
    if answer.is_stream:
        body["stream_options"] = {"include_usage": True}
    if answer.key != answer.request_id:
        body["user"] = answer.key
    headers = {"X-Request-Id": answer.request_id}
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            answer.headers_s = time.monotonic()
            answer.header = response.headers.get(_VERSION)
            if response.status != 200:
                answer.error = error_of(response.status, await response.json())
            elif answer.is_stream:
                await _read_stream(response, answer)
            else:
                _add(answer, await response.json())
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"no answer: {type(error).__name__}"


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            answer.error = f"in the stream: {event['error'].get('code') or event['error'].get('type')}"
        else:
            _add(answer, event)


def _add(answer: Answer, part: dict[str, Any]) -> None:
    for choice in part["choices"]:
        answer.token_ids += choice.get("token_ids") or ()
    if usage := part.get("usage"):
        answer.usage = usage.get("adapter_version")


async def disturb(
    fleet: Fleet,
    session: aiohttp.ClientSession,
    rollouts: Rollouts,
    load: Load,
    served: VersionCheckpoint,
    setting: Setting,
) -> list[Answer]:
    """Send all requests while versions and replicas change; return the answers."""
    answers: list[Answer] = []
    ended = asyncio.Event()

    end_s = time.monotonic() + 60.0 * setting.max_minutes

    async def client() -> None:
        while time.monotonic() < end_s and (answer := load.take()) is not None:
            await ask(session, fleet.url, answer, served.prompts[answer.prompt])
            answers.append(answer)

    async def tell() -> None:
        while not ended.is_set():
            print(
                f"{len(answers):,} requests, {fleet.num_kills} kills, {fleet.done.total()} changes, "
                f"{fleet.refused.total()} refused",
                flush=True,
            )
            await asyncio.sleep(_PROGRESS_S)

    async with asyncio.TaskGroup() as tasks:
        for seed in range(setting.changers):
            tasks.create_task(rollouts.run(load.name, seed, ended))
        tasks.create_task(list_again_and_again(fleet, ended))
        tasks.create_task(kill_replicas(fleet, setting.kill_every_s, ended))
        tasks.create_task(change_replicas(fleet, setting.replicas, setting.change_replicas_every_s, ended))
        telling = tasks.create_task(tell())
        try:
            await asyncio.gather(*(client() for _ in range(setting.clients)))
        finally:
            ended.set()
            telling.cancel()
    await fleet.replicas()
    return answers


async def counters(fleet: Fleet) -> Counter[str]:
    """Return the sums of the fleet's counters; those with a reason are separated by it."""
    async with fleet.session.get(f"{fleet.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    found: Counter[str] = Counter()
    for sample in (each for family in families for each in family.samples if family.type == "counter"):
        reason = sample.labels.get("reason")
        found[f"{sample.name} {reason}" if reason else sample.name] += int(sample.value)
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """The changes made to a fleet, and its answers meanwhile. `counters`: at the end."""

    fleet: Fleet
    answers: Sequence[Answer]
    counters: Counter[str]
    took_s: float


async def run(url: str, served: VersionCheckpoint, setting: Setting, scratch: Path) -> Run:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    # The outcome of a change must be known, so none is sent on a connection that the server may be closing.
    admin = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), timeout=timeout)
    clients = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
    async with admin, clients:
        fleet = Fleet(url=url, session=admin)
        rollouts = Rollouts(fleet, served, overwritten(served, setting), scratch / "overwritten")
        await rollouts.load_all()
        load = Load(served, setting.requests)
        began_s = time.monotonic()
        answers = await disturb(fleet, clients, rollouts, load, served, setting)
        took_s = time.monotonic() - began_s
        return Run(fleet=fleet, answers=answers, counters=await counters(fleet), took_s=took_s)


def overwritten(served: VersionCheckpoint, setting: Setting) -> list[str]:
    return list(served.versions)[: setting.overwritten]


def judged(run: Run, served: VersionCheckpoint, setting: Setting, log: Path) -> dict[str, Any]:
    """Return a run's findings. `log`: of the server, which has ended, so that the log is complete."""
    fleet, counted = run.fleet, run.counters
    judge = Judge(promises=fleet.promises, served=served, overwritten=overwritten(served, setting))
    for answer in run.answers:
        judge.judge(answer)
    for listing in fleet.listings:
        judge.judge_listing(listing)
    judge.judge_log(_log_lines(log), run.answers, fleet.changes)
    return {
        "seconds": round(run.took_s, 1),
        "requests_per_s": round(len(run.answers) / run.took_s, 1),
        **judge.summary(),
        "kills": fleet.num_kills,
        "changes": dict(sorted(fleet.done.items())),
        "changes_refused": dict(sorted(fleet.refused.items())),
        "moves": {
            "plans": counted["loraplex:placements_total"],
            "adapters_brought": fleet.brought.total(),
            "requests_after_a_death": counted["loraplex:continuations_total died"],
            "requests_moved": counted["loraplex:continuations_total moved"],
        },
    }


def _log_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSON log; a killed process may leave half a line."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def command(served: VersionCheckpoint, setting: Setting, scratch: Path) -> ServerCommand:
    program = str(Path(sys.executable).with_name("loraplex"))
    folders = (served.base.parent / "versions", scratch / "overwritten")
    return ServerCommand(
        args=(
            *(program, "fleet", "serve", "--replicas", str(setting.replicas)),
            *("--model", str(served.base), "--served-model-name", BASE, "--port", "{port}"),
            *(part for folder in folders for part in ("--allow-adapter-dir", str(folder))),
            *("--dtype", "float32", "--threads", "1", "--kv-memory", "16MiB"),
            *("--host-adapter-memory", setting.host_adapter_memory),
            *("--placement", "auto", "--period", f"{setting.placement_period_s:g}", "--migrate"),
            *("--state-dir", str(scratch / "state"), "--log-format", "json", "--no-shadow-twin"),
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int)
    parser.add_argument("--minutes", type=float, help="stop after so long, with fewer requests")
    parser.add_argument("--tiny", action="store_true", help="try the script: few requests, a small fleet")
    parser.add_argument("--work-dir", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    setting = TINY if args.tiny else Setting()
    setting = replace(
        setting,
        requests=args.requests or setting.requests,
        max_minutes=args.minutes or setting.max_minutes,
    )
    args.work_dir.mkdir(parents=True, exist_ok=True)
    served = version_checkpoint(
        args.work_dir.resolve() / f"versions-{setting.adapters}-{setting.versions}",
        num_adapters=setting.adapters,
        num_versions=setting.versions,
    )
    packages = ("aiohttp", "transformers", "peft", *ENGINE_PACKAGES)
    here = environment(packages) | {"sources": fingerprints(FILE)}
    log = args.work_dir / "fleet-versions.log"
    with tempfile.TemporaryDirectory(prefix="loraplex-versions-") as folder:
        scratch = Path(folder)
        (scratch / "overwritten").mkdir()
        with running(command(served, setting, scratch), log_path=log) as server:
            done = asyncio.run(run(server.base_url, served, setting, scratch))
    found = judged(done, served, setting, log)
    write_whole(args.out, json.dumps(here | {"parameters": asdict(setting), **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 1 if any(found["wrong"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
