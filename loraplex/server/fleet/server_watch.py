"""The watch over a server elsewhere: its identity, its health, and its metrics.

NEW ──start()──▶ STARTING ──▶ READY ◀──────────┐
                    │           │ no answer,   │ healthy again, with the base model and
                    ▼           ▼ or unhealthy │ all adapters
                  FAILED     UNREACHABLE ──────┘      close() leads to CLOSED from everywhere

A server that is READY but drops requests, or completes none, is shown as UNREACHABLE as well
(`dropped_requests`).

The server is restarted by its operator: the watch waits for it as long as it takes, so it never enters
FAILED after the start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.errors import EngineClosedError, EngineDeadError
from loraplex.core.stats import EngineStats
from loraplex.server.engine_life import EngineLife
from loraplex.server.engine_status import SHUTTING_DOWN, EngineState, EngineStatus
from loraplex.server.fleet.backend_adapters import BackendAdapters
from loraplex.server.fleet.backend_errors import error_detail
from loraplex.server.fleet.backend_http import BackendError, BackendHttp, UnreachableError
from loraplex.server.fleet.backend_identity import (
    Backend,
    BackendFullError,
    ExpectedBase,
    check_completes,
    check_usable,
    identify,
)
from loraplex.server.fleet.backend_metrics import parse_stats
from loraplex.server.fleet.dropped_requests import DroppedRequests
from loraplex.server.fleet.fair_turns import WaitForTurns
from loraplex.server.fleet.http_replica_options import HttpReplicaOptions
from loraplex.server.fleet.liveness import Liveness
from loraplex.server.fleet.requests_in_flight import RequestsInFlight
from loraplex.server.fleet.stalled_streams import StalledStreams
from loraplex.server.protocol_ipc import Ready, StartProgress

logger = logging.getLogger(__name__)

_AT_ONCE_S: Final = 1.0
_LOOK_TIMEOUT_S: Final = 5.0
"""Seconds to wait for a server's list of models; its health is not checked meanwhile."""


class ServerWatch:
    """The state of a server, and its transitions. `life`, `liveness`, `drops`, `stalls`: what is known of it,
    and its waiters. `look`: set when there is a reason to check it now. `backend`: the server as it last
    described itself. For use in one event loop."""

    def __init__(
        self,
        http: BackendHttp,
        expected: ExpectedBase,
        adapters: BackendAdapters,
        in_flight: RequestsInFlight,
        turns: WaitForTurns,
        options: HttpReplicaOptions,
        clock: Clock,
    ) -> None:
        self._http = http
        self._expected = expected
        self._adapters = adapters
        self._in_flight = in_flight
        self._turns = turns
        self._options = options
        self._clock = clock
        self.life = EngineLife("the replica was not started")
        self.liveness = Liveness(clock)
        self.drops = DroppedRequests(clock, options.aside_s)
        self.stalls = StalledStreams(clock, options.stall_s)
        self.look = asyncio.Event()
        self.backend: Backend | None = None
        self.info: Ready | None = None
        self._num_restarts = 0
        self._watcher: asyncio.Task[None] | None = None
        self._stats = EngineStats()
        self._stats_taken_s = float("-inf")
        self._stats_call: asyncio.Task[None] | None = None
        self._retry: asyncio.Task[None] | None = None  # of adapters that were refused
        self._mending: asyncio.Task[None] | None = None  # of adapters that the server turned out to lack
        self._retried_s = clock.now_s()

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def healthy(self) -> bool:
        return self.life.is_ready and self.drops.reason is None

    @property
    def status(self) -> EngineStatus:
        drops = self.drops
        is_aside = self.life.is_ready and drops.reason is not None
        return EngineStatus(
            state=EngineState.UNREACHABLE if is_aside else self.life.state,
            message=(drops.reason or "") if is_aside else self.life.message,
            num_restarts=self._num_restarts,
            pid=None,
            node=self.url,
            is_dropping=is_aside and drops.is_cut,
        )

    async def start(
        self,
        on_progress: Callable[[StartProgress], None] | None = None,
        add_adapters: Awaitable[object] | None = None,
    ) -> None:
        """See SupervisedEngine. Raises BackendError, with the fix in it, if the server cannot be used."""
        assert self.life.state is EngineState.NEW, "a replica is started once"
        started_s = self._clock.now_s()
        self.life.set(EngineState.STARTING, f"the server at {self.url} is being asked what it serves")
        try:
            if on_progress is not None:
                on_progress(StartProgress(f"asking {self.url} what it serves"))
            timeout_s = self._options.call_timeout_s
            backend = await identify(self._http, self._expected, timeout_s=timeout_s)
            await check_usable(self._http, backend, timeout_s=timeout_s)
            self._meet(backend)
            self.life.takes_adapters.set()
            if add_adapters is not None:
                await add_adapters
            self.info = await self._ready(backend, started_s)
            self.life.raise_if_gone()
        except BaseException as error:
            self.life.set(EngineState.FAILED, str(error) or "the start was cancelled")
            await self._http.close()
            raise
        logger.info("%s: %s %s serves %r", self.url, backend.kind, backend.version, backend.base_model)
        self.life.set(EngineState.READY, "")
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self.url}")

    async def close(self) -> None:
        """End the watch, and everything that waits for the server."""
        self.life.set(EngineState.CLOSED, SHUTTING_DOWN)
        self.liveness.give_up(EngineClosedError(SHUTTING_DOWN))
        begun = (self._watcher, self._stats_call, self._retry, self._mending)
        tasks = [task for task in begun if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ready_backend(self) -> Backend:
        """Return the server as soon as it is ready. Raises EngineDeadError if that takes too long or cannot
        happen."""
        await self.life.wait_ready(self._options.ready_timeout_s)
        assert self.backend is not None
        return self.backend

    async def stats(self) -> EngineStats:
        """See EngineClient.stats. All are zero while the server is away."""
        age_s = self._clock.now_s() - self._stats_taken_s
        if self.healthy and age_s > self._options.stats_max_age_s:
            if self._stats_call is None or self._stats_call.done():
                self._stats_call = asyncio.create_task(self._read_stats())
            await asyncio.wait([self._stats_call], timeout=self._options.stats_timeout_s)
        return self._stats

    def doubt(self, error: EngineDeadError) -> None:
        """Handle a failed request that may mean that the server is gone."""
        if isinstance(error, UnreachableError) and error.nobody_listens:
            self.lose(str(error))
        self.look.set()

    def note_drop(self, era: int, error: EngineDeadError, *, is_cut: bool) -> None:
        """Record that a request was dropped before its first token. This is ignored for a server that is
        lost: the watch handles that."""
        if not self.life.is_ready:
            return
        if self.drops.dropped(era, self._aside_in_words("drops requests", error), is_cut=is_cut):
            logger.error("%s; it is sent none until it completes a prompt", self.drops.reason)

    def _aside_in_words(self, what: str, error: Exception) -> str:
        problem = str(error).partition("; ")[0]  # without its advice, which does not apply here
        return f"the server at {self.url} says that it is well, but {what} ({problem}); see its log"

    async def _check_completes(self) -> None:
        """Raise BackendError, with a message for the status, unless the server completes a prompt or has too
        many requests to accept it, which is no fault."""
        assert self.backend is not None
        timeout_s = min(self._options.call_timeout_s, _LOOK_TIMEOUT_S)
        self._in_flight.begin(None)
        try:
            await check_completes(self._http, self.backend, timeout_s=timeout_s)
        except BackendFullError:
            pass
        except BackendError as error:
            raise BackendError(self._aside_in_words("completes no prompt", error)) from error
        finally:
            self._in_flight.end(None)

    def note_stall(self) -> None:
        """Handle a stalled request: send the server no others until it completes a prompt, because they would
        stall too, each for a minute. A server that still sends tokens is only slow."""
        if self.healthy and not self.stalls.tokens_come:
            reason = f"the server at {self.url} says that it is well, but sends nothing of its requests"
            self.drops.set_aside(f"{reason}; see its log", is_cut=False)
            logger.error("%s; it is sent none until it completes a prompt", self.drops.reason)

    async def _try_again(self) -> None:
        """Send requests again to a server that was set aside, if it completes a prompt."""
        try:
            await self._check_completes()
        except BackendError as error:
            self.drops.failed_again(str(error))
            return
        self.drops.try_again()
        logger.info("the server at %s answers again, and is sent requests", self.url)

    async def _watch(self) -> None:
        """Check the server periodically until the replica is closed."""
        pause_s = self._options.first_pause_s
        while True:
            is_urgent = await self._wait_to_look(pause_s)
            try:
                if is_urgent or not self._heard_lately():
                    await self._check_health()
                if self.life.state is EngineState.UNREACHABLE or is_urgent:
                    # A server that broke a connection may have been restarted since.
                    await self._bring_back()
                if self.life.is_ready and self.drops.is_due:
                    await self._try_again()
                self._retry_refused()
                pause_s = self._options.first_pause_s
            except (EngineDeadError, BackendError) as error:
                self.lose(str(error))
                pause_s = min(2 * pause_s, self._options.max_pause_s)
            except Exception:
                logger.exception("the watch over %s went wrong; it goes on", self.url)
                self.lose(f"the watch over {self.url} went wrong")
                pause_s = self._options.max_pause_s

    def _retry_refused(self) -> None:
        """Offer the server again what it refused, if it is time; in a task, as that may take long."""
        now_s = self._clock.now_s()
        if not self._adapters.refused:
            self._retried_s = now_s  # anything refused from now on has just been tried
        elif now_s - self._retried_s >= self._options.refused_retry_s and (
            self._retry is None or self._retry.done()
        ):
            self._retried_s = now_s
            self._retry = asyncio.create_task(self._offer_refused())

    async def _offer_refused(self) -> None:
        try:
            await self._adapters.retry()
        except EngineDeadError:
            self.look.set()

    async def _wait_to_look(self, pause_s: float) -> bool:
        """Wait until it is time for a check; return whether there is a special reason for it."""
        if self.healthy:
            pause_s = self._options.busy_interval_s if self._in_flight.num else self._options.idle_interval_s
        try:
            async with asyncio.timeout(pause_s):
                await self.look.wait()
        except TimeoutError:
            return False
        self.look.clear()
        # Many requests may fail one after the other, and a server that is away must not be asked more often.
        await asyncio.sleep(self._options.first_pause_s if self.healthy else pause_s)
        return True

    def _heard_lately(self) -> bool:
        age_s = self._clock.now_s() - self.liveness.heard_s
        return self.healthy and age_s < self._options.busy_interval_s

    async def _check_health(self) -> None:
        """Raise EngineDeadError unless the server is healthy, or sends tokens and is too busy to answer."""
        asked_s = self._clock.now_s()
        try:
            answer = await self._http.call("GET", "/health", timeout_s=self._options.silence_s)
        except UnreachableError as error:
            if not error.nobody_listens and self.liveness.heard_s > asked_s:
                return
            raise
        if answer.status != 200:
            message = error_detail(answer).message
            raise EngineDeadError(f"the server at {self.url} is not well (HTTP {answer.status}: {message})")
        self.liveness.heard()

    async def answers(self) -> bool:
        """Return whether the server reports at once that it is healthy."""
        try:
            answer = await self._http.call("GET", "/health", timeout_s=_AT_ONCE_S)
        except UnreachableError:
            return False
        return answer.status == 200

    async def _bring_back(self) -> None:
        """Make sure that the server is the expected one, with all adapters: before it serves again if it was
        away, otherwise while it serves."""
        timeout_s = min(self._options.call_timeout_s, _LOOK_TIMEOUT_S)
        backend = await identify(self._http, self._expected, timeout_s=timeout_s)
        self._meet(backend)
        if self.life.state is EngineState.READY:
            if self._mending is not None:
                self._mending.cancel()  # loads in progress continue, and are joined
            self._mending = asyncio.create_task(self._mend(backend.adapters))
        elif self.life.state is EngineState.UNREACHABLE:
            await self._restore(backend.adapters)
            self._num_restarts += 1
            self.info = await self._ready(backend, self._clock.now_s())
            self.life.set(EngineState.READY, "")
            logger.info("the server at %s is back", self.url)

    async def _mend(self, served: Iterable[str]) -> None:
        try:
            await self._adapters.restore(served)
        except EngineDeadError:
            self.look.set()
        except Exception:
            logger.exception("the adapters of %s could not be looked after", self.url)

    async def _restore(self, served: Iterable[str]) -> None:
        """Update the adapters of a server that was away, and check its health meanwhile: loads may take
        minutes. Raises EngineDeadError if it goes away again."""
        restoring = asyncio.create_task(self._adapters.restore(served))
        try:
            while not (await asyncio.wait([restoring], timeout=self._options.idle_interval_s))[0]:
                await self._check_health()
            await restoring
        except EngineDeadError as error:
            self._adapters.give_up(str(error))
            raise
        finally:
            restoring.cancel()
            await asyncio.gather(restoring, return_exceptions=True)

    def _meet(self, backend: Backend) -> None:
        self.backend = backend
        self._adapters.kind = backend.kind

    async def _ready(self, backend: Backend, started_s: float) -> Ready:
        stats = await self._fetch_stats()
        return Ready(
            num_kv_blocks=None if stats is None else stats.num_kv_blocks or None,
            max_model_len=backend.max_model_len,
            load_s=self._clock.now_s() - started_s,
        )

    def lose(self, reason: str) -> None:
        """Handle that the server is away: its requests are lost, and it may have lost its adapters."""
        if self.life.state is EngineState.READY:
            logger.error("%s; looking for it until it is back", reason)
            self.life.set(EngineState.UNREACHABLE, reason)
            for task in (self._retry, self._mending):
                if task is not None:
                    task.cancel()  # their loads wait until the server is back
            self._adapters.give_up(reason)
            self._stats, self._stats_taken_s = EngineStats(), float("-inf")
            self.liveness.give_up(EngineDeadError(f"{reason}; send the request again"))
            self.look.set()
        elif self.life.state is EngineState.UNREACHABLE and reason != self.life.message:
            logger.warning("%s", reason)
            self.life.message = reason

    async def _fetch_stats(self) -> EngineStats | None:
        try:
            answer = await self._http.call("GET", "/metrics", timeout_s=self._options.stats_timeout_s)
        except UnreachableError:
            return None
        if answer.status != 200:
            return None
        try:
            return parse_stats(answer.body.decode("utf-8", "replace"), self._in_flight.by_version)
        except ValueError as error:
            logger.warning("the metrics of %s cannot be read: %s", self.url, error)
            return None

    async def _read_stats(self) -> None:
        era = self.liveness.era
        stats = await self._fetch_stats()
        if era == self.liveness.era:
            if stats is not None:
                self._stats = stats
                self.stalls.saw(stats, num_ours=self._in_flight.num - self._turns.num_waiting)
            self._stats_taken_s = self._clock.now_s()
