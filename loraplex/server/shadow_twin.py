"""The shadow twin: the requests of the last minutes, replayed on a model of the engine.

Comparing its predictions with measurements shows how far to trust the cost model, which routing, admission
and placement rely on. A process of the lowest priority does the work (`shadow_replay`), periodically and only
if there were requests; replays that would take too long are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from loraplex.core.engine_policy import EnginePolicy
from loraplex.server.child_python import same_python
from loraplex.server.decoders import decode_json
from loraplex.server.profile_origin import package_profile_name
from loraplex.server.recent_requests import RecentRequest, RecentRequests
from loraplex.server.shadow_messages import Replayed, SeenRequest, Window

logger = logging.getLogger(__name__)

DEFAULT_INTERVAL_S: Final = 30.0
WINDOW_S: Final = 120.0
_MAX_REPLAY_S: Final = 10.0
"""Seconds of CPU time that a replay may be expected to take."""
_GIVE_UP_S: Final = 60.0
"""Seconds to wait for an answer: the process gets only the CPU time that others leave."""
_MODULE: Final = "loraplex.server.shadow_replay"


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinSubject:
    """The engine that is modelled, or several that are alike: its profile as JSON, how it decides, the
    largest number of requests in a step, the parameters of adapters per unit of rank, and its recent
    requests."""

    costs: str
    policy: EnginePolicy
    max_running: int
    rank_params: float
    recent: RecentRequests


class Shadowed(Protocol):
    """An engine that describes itself for its twin."""

    def twin(self) -> TwinSubject | None:
        """Return the description; None if the engine's costs are not known."""
        ...


class ReplayEnd(StrEnum):
    """The outcome of a replay. SKIPPED: it would have taken too long, or did."""

    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinFigures:
    """The figures shown of the twin. `latest`: the last replay; None if there were no recent requests, or it
    was skipped or failed. `is_measured`: the profile was measured, on this machine or on one of its kind."""

    is_measured: bool
    num_replays: dict[ReplayEnd, int]
    latest: Replayed | None


class ShadowTwin:
    """Replays windows periodically. Use as an asynchronous context manager."""

    def __init__(self, engine: Shadowed, *, interval_s: float = DEFAULT_INTERVAL_S) -> None:
        """`engine`: one whose costs are known."""
        subject = engine.twin()
        assert subject is not None, "nothing is known of this engine"
        self._engine = engine
        self._interval_s = interval_s
        self._is_measured = bool(json.loads(subject.costs)["measured"])
        self._package_profile = package_profile_name(subject.costs) if self._is_measured else None
        self._num_replays: Counter[ReplayEnd] = Counter()
        self._latest: Replayed | None = None
        self._request_s = 0.0  # CPU seconds of the last replay per request
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_said_why = False

    async def __aenter__(self) -> ShadowTwin:
        if self._package_profile is not None:
            logger.info(
                "the shadow twin predicts by the package's profile %s, measured on a machine of this kind; "
                "`loraplex profile --model MODEL` measures this one",
                self._package_profile,
            )
        elif self._is_measured:
            logger.info("the shadow twin predicts by the profile that was measured on this machine")
        else:
            logger.info(
                "nobody has measured this machine, so the shadow twin predicts by guessed costs; "
                "`loraplex profile --model MODEL` measures them"
            )
        self._task = asyncio.create_task(self._run(), name="shadow-twin")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end_process()

    @property
    def figures(self) -> TwinFigures:
        return TwinFigures(
            is_measured=self._is_measured,
            num_replays={end: self._num_replays[end] for end in ReplayEnd},
            latest=self._latest,
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look()

    async def look(self) -> None:
        """Replay the last minutes, if there were requests and the replay would not take too long."""
        subject = self._engine.twin()
        if subject is None:
            return
        recent = subject.recent
        now_s = recent.now_s()
        since_s = max(now_s - WINDOW_S, recent.complete_since_s)
        requests = recent.since(since_s)
        if not requests or now_s <= since_s:
            self._latest = None
            return
        if self._request_s * len(requests) > _MAX_REPLAY_S:
            self._request_s *= 0.9  # so that it is tried again later: the machine may have been busy
            self._end(ReplayEnd.SKIPPED, f"{len(requests)} requests would take too long")
            return
        line = await asyncio.to_thread(_window_line, subject, requests, since_s, now_s)
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                replayed = await self._ask(line)
        except TimeoutError:
            self._request_s = 2 * _MAX_REPLAY_S / len(requests)
            await self._end_process()
            self._end(ReplayEnd.SKIPPED, f"{len(requests)} requests took longer than {_GIVE_UP_S:g} s")
            return
        except (OSError, EOFError, ValueError) as error:  # ValueError: an invalid answer
            await self._end_process()
            self._end(ReplayEnd.FAILED, str(error))
            return
        self._request_s = replayed.seconds / len(requests)
        if replayed.error is not None:
            self._end(ReplayEnd.FAILED, replayed.error)
            return
        self._num_replays[ReplayEnd.DONE] += 1
        self._latest = replayed

    def _end(self, end: ReplayEnd, why: str) -> None:
        """Record a replay without a result; only the first is logged as a warning."""
        self._num_replays[end] += 1
        self._latest = None
        level = logging.DEBUG if self._has_said_why else logging.WARNING
        self._has_said_why = True
        logger.log(level, "the shadow twin has no figures of the last minutes: %s", why)

    async def _ask(self, line: bytes) -> Replayed:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *same_python(),
                *("-m", _MODULE),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,  # Ctrl-C is for the server, which ends this process
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line)
        await process.stdin.drain()
        answer = await process.stdout.readline()
        if not answer:
            raise EOFError(f"its process ended with code {await process.wait()}")
        return decode_json(answer, Replayed)

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _window_line(
    subject: TwinSubject, requests: Sequence[RecentRequest], since_s: float, until_s: float
) -> bytes:
    """Return a `Window` as a line for the replaying process."""
    adapters: dict[str | None, int] = {}
    ranks: list[int] = []
    seen = []
    for each in requests:
        if each.version not in adapters:
            adapters[each.version] = len(ranks)
            ranks.append(each.rank)
        seen.append(
            SeenRequest(
                each.replica,
                adapters[each.version],
                max(each.prompt_tokens - each.num_cached, 1),
                each.num_output,
                each.sent_s,
                each.first_s,
                each.last_s,
            )
        )
    window = Window(
        costs=subject.costs,
        policy=subject.policy,
        max_running=subject.max_running,
        rank_params=subject.rank_params,
        ranks=ranks,
        requests=seen,
        since_s=since_s,
        until_s=until_s,
    )
    return msgspec.json.encode(window) + b"\n"
