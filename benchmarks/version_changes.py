"""Disturbances of a live fleet: versions come and go, replicas leave, join and are killed."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp

from benchmarks.fleet_kills import Turns
from benchmarks.version_checkpoint import AdapterVersion, VersionCheckpoint
from benchmarks.version_promises import Change, Listing, Promises, Standing

SHARES: Final = (0.1, 0.3, 0.5, 0.8)
_MAX_PREVIOUS: Final = 5
_PAUSE_S: Final = 0.5
"""Longest pause of a changer between two changes, in seconds."""
_UNLOADED_S: Final = 0.2
_LIST_S: Final = 2.0
_LOOK_S: Final = 0.2
_DRAINED_S: Final = 2.0


def error_of(status: int, body: Any) -> str:
    """Return the key that an error is counted under: its status, and its code or type."""
    error = body.get("error", {}) if isinstance(body, dict) else {}
    return f"{status} {error.get('code') or error.get('type') or 'without a type'}"


async def pause(ended: asyncio.Event, seconds: float) -> None:
    """Wait, but no longer than until the end of the run."""
    with suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), seconds)


@dataclass(kw_only=True)
class Fleet:
    """A live fleet, and what was done to it. `refused`: changes that were answered with an error."""

    url: str
    session: aiohttp.ClientSession
    promises: Promises = field(default_factory=Promises)
    changes: list[Change] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    brought: Counter[int] = field(default_factory=Counter)
    num_kills: int = 0

    async def call(self, path: str, body: dict[str, Any], request_id: str = "") -> str | None:
        """Request a change; return the reason if it was refused."""
        headers = {"X-Request-Id": request_id} if request_id else {}
        async with self.session.post(f"{self.url}{path}", json=body, headers=headers) as response:
            if response.status == 200:
                await response.read()
                return None
            return error_of(response.status, await response.json())

    async def replicas(self) -> list[dict[str, Any]]:
        async with self.session.get(f"{self.url}/v1/fleet") as response:
            found: list[dict[str, Any]] = (await response.json())["data"]
        for each in found:
            self.brought[each["replica"]] = max(self.brought[each["replica"]], each["brought"])
        return found

    async def change_replicas(self, what: str, **body: Any) -> None:
        error = await self.call(f"/v1/fleet/{what}", body)
        name = f"{what} --move" if body.get("move") else what
        if error is None:
            self.done[name] += 1
        else:
            self.refused[f"{name}: {error}"] += 1

    async def list_adapters(self) -> None:
        since_s = time.monotonic()
        async with self.session.get(f"{self.url}/v1/adapters") as response:
            if response.status != 200:
                self.refused[f"list: {error_of(response.status, await response.json())}"] += 1
                return
            data = (await response.json())["data"]
        found = {
            each["name"]: (each["version"], None if each["canary"] is None else each["canary"]["version"])
            for each in data
        }
        self.listings.append(Listing(since_s=since_s, until_s=time.monotonic(), found=found))


class Rollouts:
    """Changes the versions that names stand for: loads, reloads, canaries, promotions, rollbacks, unloads.

    Names of `overwritten` have one folder, whose files are replaced before each reload; for all others every
    version has its own folder.
    """

    def __init__(
        self, fleet: Fleet, served: VersionCheckpoint, overwritten: Sequence[str], folder: Path
    ) -> None:
        self._fleet = fleet
        self._versions = served.versions
        self._overwritten = {name: folder / name for name in overwritten}
        self._previous: dict[str, list[str]] = {name: [] for name in self._versions}
        self._changing: set[str] = set()
        self._numbers = iter(range(10**9))

    async def load_all(self) -> None:
        for name in self._versions:
            await self._load("load", name, self._versions[name][0])

    async def run(self, names: Callable[[random.Random], str], seed: int, ended: asyncio.Event) -> None:
        """Change one name after the other; `names` chooses which."""
        rng = random.Random(seed)
        while not ended.is_set():
            name = names(rng)
            if name not in self._changing:
                self._changing.add(name)
                try:
                    await self._change(name, rng)
                finally:
                    self._changing.discard(name)
            await pause(ended, rng.random() * _PAUSE_S)

    async def _change(self, name: str, rng: random.Random) -> None:
        now = self._fleet.promises.now(name)
        others = [each for each in self._versions[name] if each.version != now.version]
        if now.version is None:
            await self._load("load", name, rng.choice(others))
        elif now.canary is not None:
            await self._change_trial(now, rng)
        elif name in self._overwritten:
            await rng.choices((self._reload, self._unload), (5, 1))[0](name, rng.choice(others))
        else:
            ways: list[Callable[[str, AdapterVersion], Awaitable[None]]] = [self._reload, self._try]
            ways += [self._roll_back, self._unload]
            weights = (5, 3, 2 if self._previous[name] else 0, 1)
            await rng.choices(ways, weights)[0](name, rng.choice(others))

    async def _change_trial(self, now: Standing, rng: random.Random) -> None:
        assert now.canary is not None
        verb = rng.choice(("promote", "abort", "share"))
        if verb == "share":
            version = next(each for each in self._versions[now.name] if each.version == now.canary)
            await self._try(now.name, version, "canary share")
        elif verb == "promote":
            after = Standing(name=now.name, version=now.canary)
            await self._ask(verb, after, {}, audited=now.canary)
        else:
            await self._ask(verb, replace(now, canary=None, share=0.0), {}, audited=now.version)

    async def _reload(self, name: str, version: AdapterVersion) -> None:
        await self._load("reload", name, version)

    async def _load(self, verb: str, name: str, version: AdapterVersion) -> None:
        folder = version.folder
        if name in self._overwritten:
            folder = self._overwritten[name]
            await asyncio.to_thread(_overwrite, folder, version.folder)
        after = Standing(name=name, version=version.version)
        body = {"lora_path": str(folder), "load_inplace": verb == "reload"}
        await self._ask(verb, after, body, audited=version.version, path="load")

    async def _try(self, name: str, version: AdapterVersion, verb: str = "canary") -> None:
        now = self._fleet.promises.now(name)
        share = random.Random(f"{name}{next(self._numbers)}").choice([x for x in SHARES if x != now.share])
        after = replace(now, canary=version.version, share=share)
        body = {"lora_path": str(version.folder), "canary_share": share}
        await self._ask(verb, after, body, audited=version.version, path="load")

    async def _roll_back(self, name: str, _: AdapterVersion) -> None:
        version = self._previous[name][0]
        await self._ask("rollback", Standing(name=name, version=version), {}, audited=version)

    async def _unload(self, name: str, next_version: AdapterVersion) -> None:
        """Unload a name, and load it again soon after."""
        await self._ask("unload", Standing(name=name), {}, audited=None)
        await asyncio.sleep(_UNLOADED_S)
        await self._load("load", name, next_version)

    async def _ask(
        self,
        verb: str,
        after: Standing,
        body: dict[str, Any],
        *,
        audited: str | None,
        path: str | None = None,
    ) -> None:
        """Request a change, and record its outcome. `audited`: the new version in its audit line."""
        fleet, request_id = self._fleet, f"change-{next(self._numbers)}"
        before, began_s = fleet.promises.now(after.name), time.monotonic()
        error = await fleet.call(
            f"/v1/{path or verb}_lora_adapter", {"lora_name": after.name, **body}, request_id
        )
        is_done = error is None
        fleet.changes.append(Change(request_id=request_id, verb=verb, version=audited, is_done=is_done))
        if not is_done:
            fleet.refused[f"{verb}: {error}"] += 1
            return
        fleet.done[verb] += 1
        fleet.promises.changed(after, began_s=began_s, ended_s=time.monotonic())
        self._remember(verb, before, after)

    def _remember(self, verb: str, before: Standing, after: Standing) -> None:
        """Record the versions that a name can be rolled back to, the latest first."""
        previous = self._previous[after.name]
        if after.version is None:
            previous.clear()
        elif verb == "rollback":
            del previous[0]
        elif before.version is not None and before.version != after.version:
            left = [each for each in previous if each not in (before.version, after.version)]
            previous[:] = [before.version, *left][:_MAX_PREVIOUS]


def _overwrite(folder: Path, source: Path) -> None:
    """Replace the files in a folder by those of a version, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(source / file, folder / f"{file}.new")
        (folder / f"{file}.new").replace(folder / file)


async def list_again_and_again(fleet: Fleet, ended: asyncio.Event) -> None:
    while not ended.is_set():
        await fleet.list_adapters()
        await pause(ended, _LIST_S)


async def change_replicas(fleet: Fleet, num_replicas: int, every_s: float, ended: asyncio.Event) -> None:
    """Drain, replace, add and remove replicas in turn, every `every_s` seconds."""
    rng, number = random.Random(2), 0
    while True:
        await pause(ended, every_s)
        if ended.is_set():
            return
        replica, move = rng.randrange(num_replicas), bool(number // 3 % 2)
        if number % 3 == 0:
            await fleet.change_replicas("drain", replica=replica, move=not move)
            await pause(ended, _DRAINED_S)
            await fleet.change_replicas("undrain", replica=replica)
        elif number % 3 == 1:
            await fleet.change_replicas("restart", replica=replica, move=move)
        else:
            await fleet.change_replicas("scale", replicas=num_replicas + 1)
            await pause(ended, _DRAINED_S)
            await fleet.change_replicas("scale", replicas=num_replicas, move=move)
        number += 1


async def kill_replicas(fleet: Fleet, every_s: float, ended: asyncio.Event) -> None:
    """Kill a replica every `every_s` seconds, once another one is ready."""
    rng, turns = random.Random(3), Turns()
    while True:
        await pause(ended, every_s)
        while not ended.is_set():
            ready = [
                each for each in await fleet.replicas() if each["state"] == "ready" and not each["drained"]
            ]
            able = [each for each in ready if turns.may_die(each["replica"])]
            if len(ready) >= 2 and able:
                victim = rng.choice(able)
                with suppress(ProcessLookupError):  # it was replaced just now
                    os.kill(victim["pid"], signal.SIGKILL)
                    turns.died(victim["replica"])
                    fleet.num_kills += 1
                break
            await pause(ended, _LOOK_S)
        if ended.is_set():
            return
