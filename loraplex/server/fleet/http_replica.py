"""A replica that is a server which already runs somewhere, stock vLLM or loraplex, driven over HTTP.

NEW ──start()──▶ STARTING ──▶ READY ◀──────────┐
                    │           │ no answer,   │ well again, with the base model and
                    ▼           ▼ or not well  │ all adapters
                  FAILED     UNREACHABLE ──────┘      close() leads to CLOSED from everywhere

One that is READY, but drops requests, is shown as UNREACHABLE as well (`dropped_requests`).

Who started the server brings it back: it is asked for as long as it takes, so a replica never fails later on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.clock import Clock, MonotonicClock
from loraplex.core.errors import EngineClosedError, EngineDeadError, RequestMovedError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.engine.staging import answer_once
from loraplex.server.engine_life import EngineLife
from loraplex.server.engine_status import SHUTTING_DOWN, EngineState, EngineStatus
from loraplex.server.fleet.backend_adapters import BackendAdapters, IsRegistered, SeenPath, adapter_name
from loraplex.server.fleet.backend_errors import ModelUnknownError, NotAcceptedError, error_detail
from loraplex.server.fleet.backend_http import BackendAddress, BackendError, BackendHttp, UnreachableError
from loraplex.server.fleet.backend_identity import (
    Backend,
    ExpectedBase,
    check_completes,
    check_usable,
    identify,
)
from loraplex.server.fleet.backend_metrics import parse_stats
from loraplex.server.fleet.completion_body import completion_body, continuation
from loraplex.server.fleet.completion_calls import CompletionCalls
from loraplex.server.fleet.dropped_requests import DroppedRequests
from loraplex.server.fleet.liveness import Liveness
from loraplex.server.fleet.stalled_streams import StalledStreams
from loraplex.server.protocol_ipc import Ready, StartProgress
from loraplex.server.replica import Continuation
from loraplex.server.version_use import VersionUse

logger = logging.getLogger(__name__)

_AT_ONCE_S: Final = 1.0
_LOOK_TIMEOUT_S: Final = 5.0
"""How long the watch over a server waits for its list of models; nobody looks after its health meanwhile."""


@dataclass(frozen=True, kw_only=True)
class HttpReplicaOptions:
    """How patient a replica is.

    `ready_timeout_s`: how long a request waits for a server that is away; not at all by default, as a fleet
    has other replicas. A server that has sent nothing for `silence_s`, not even to a question after its
    health, is taken for dead; it is asked every `busy_interval_s` while requests wait for it, else every
    `idle_interval_s`. `seen_path` says where the server finds a version's files, if elsewhere than here, and
    `is_registered` whether another front of the server may want a version that this one does not. Adapters
    that the server refuses are offered again every `refused_retry_s`. `aside_s`: the first and the longest
    pause of a server that drops requests. A stream that is silent for `stall_s`, and longer where prompts are
    long, has stalled (`stalled_streams`). An answer with a token beyond `vocab_size` cannot be read.
    """

    call_timeout_s: float = 30.0
    load_timeout_s: float = 300.0
    ready_timeout_s: float = 0.0
    busy_interval_s: float = 0.5
    idle_interval_s: float = 1.0
    silence_s: float = 1.5
    first_pause_s: float = 0.1
    max_pause_s: float = 3.0
    stats_max_age_s: float = 0.5
    stats_timeout_s: float = 2.0
    num_loads_at_once: int = 4
    refused_retry_s: float = 30.0
    aside_s: tuple[float, float] = (0.5, 10.0)
    stall_s: float = 60.0
    vocab_size: int | None = None
    seen_path: SeenPath | None = None
    is_registered: IsRegistered | None = None


class HttpReplica:
    """A SupervisedEngine behind a URL. For use in one event loop.

    Closing it leaves the server and its adapters as they are: the next fleet finds them loaded.
    """

    def __init__(
        self,
        address: BackendAddress,
        expected: ExpectedBase,
        *,
        options: HttpReplicaOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._options = options or HttpReplicaOptions()
        self._expected = expected
        self._clock = clock or MonotonicClock()
        self._http = BackendHttp(address)
        self._adapters = BackendAdapters(
            self._http,
            timeout_s=self._options.load_timeout_s,
            num_at_once=self._options.num_loads_at_once,
            seen_path=self._options.seen_path,
            is_registered=self._options.is_registered,
            in_use=lambda version: version in self._uses,
        )
        self._liveness = Liveness(self._clock)
        self._stalls = StalledStreams(self._clock, self._options.stall_s)
        self._calls = CompletionCalls(
            self._http,
            self._adapters,
            self._liveness,
            self._stalls,
            self._clock,
            vocab_size=self._options.vocab_size,
            on_trouble=self._doubt,
        )
        self._drops = DroppedRequests(self._clock, self._options.aside_s)
        self._life = EngineLife("the replica was not started")
        self._num_restarts = 0
        self._look = asyncio.Event()  # set when there is a reason to look after the server now
        self._watcher: asyncio.Task[None] | None = None
        self._uses: dict[str, VersionUse] = {}
        self._in_flight: dict[str, int] = {}
        self._num_in_flight = 0
        self._stats = EngineStats()
        self._stats_taken_s = float("-inf")
        self._stats_call: asyncio.Task[None] | None = None
        self._retry: asyncio.Task[None] | None = None  # of adapters that were refused
        self._mending: asyncio.Task[None] | None = None  # of adapters that a server turned out to lack
        self._probe: asyncio.Task[None] | None = None  # whether it completes a prompt, after one has stalled
        self._retried_s = self._clock.now_s()
        self.backend: Backend | None = None
        """The server as it last described itself."""
        self.failed = asyncio.Event()
        """Never set: see above."""
        self.info: Ready | None = None

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def healthy(self) -> bool:
        return self._life.is_ready and self._drops.reason is None

    @property
    def status(self) -> EngineStatus:
        drops = self._drops
        is_aside = self._life.is_ready and drops.reason is not None
        return EngineStatus(
            state=EngineState.UNREACHABLE if is_aside else self._life.state,
            message=(drops.reason or "") if is_aside else self._life.message,
            num_restarts=self._num_restarts,
            pid=None,
            node=self.url,
            is_dropping=is_aside and drops.is_cut,
        )

    @property
    def refused(self) -> Mapping[str, str]:
        """See Replica."""
        return self._adapters.refused

    @property
    def stalled(self) -> Sequence[str]:
        """See Replica."""
        return self._calls.stalled()

    def continuation(self, request: EngineRequest) -> Continuation:
        """See Replica."""
        assert self.backend is not None, "a request that has begun is sent to a server that was there"
        return continuation(request, self.backend.kind)

    def hand_over(self, request_id: str | None = None) -> None:
        """See Replica."""
        error = RequestMovedError(f"the fleet takes its requests away from {self.url}")
        if request_id is None:
            self._liveness.give_up(error)
        else:
            if request_id in self.stalled and (self._probe is None or self._probe.done()):
                self._probe = asyncio.create_task(self._set_aside_if_stuck())
            self._calls.give_up(request_id, error)

    async def start(
        self,
        on_progress: Callable[[StartProgress], None] | None = None,
        add_adapters: Awaitable[object] | None = None,
    ) -> None:
        """See SupervisedEngine. Raises BackendError, with the fix in it, if the server cannot be used."""
        assert self._life.state is EngineState.NEW, "a replica is started once"
        started_s = self._clock.now_s()
        self._life.set(EngineState.STARTING, f"the server at {self.url} is being asked what it serves")
        try:
            if on_progress is not None:
                on_progress(StartProgress(f"asking {self.url} what it serves"))
            timeout_s = self._options.call_timeout_s
            backend = await identify(self._http, self._expected, timeout_s=timeout_s)
            await check_usable(self._http, backend, timeout_s=timeout_s)
            self._meet(backend)
            self._life.takes_adapters.set()
            if add_adapters is not None:
                await add_adapters
            self.info = await self._ready(backend, started_s)
            self._life.raise_if_gone()
        except BaseException as error:
            self._life.set(EngineState.FAILED, str(error) or "the start was cancelled")
            await self._http.close()
            raise
        logger.info("%s: %s %s serves %r", self.url, backend.kind, backend.version, backend.base_model)
        self._life.set(EngineState.READY, "")
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self.url}")

    async def close(self) -> None:
        """See SupervisedEngine. What runs on the server for this replica is cancelled there."""
        self._life.set(EngineState.CLOSED, SHUTTING_DOWN)
        self._liveness.give_up(EngineClosedError(SHUTTING_DOWN))
        begun = (self._watcher, self._stats_call, self._retry, self._mending, self._probe)
        tasks = [task for task in begun if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._adapters.close()
        await self._http.close()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See AsyncEngine. Outputs that a slow consumer missed are merged."""
        backend = await self._ready_backend()
        model = backend.base_model if request.adapter is None else adapter_name(request.adapter)
        body = completion_body(request, model=model, kind=backend.kind, max_model_len=backend.max_model_len)
        self._begin(request.adapter)
        has_tokens, era = False, self._drops.era
        try:
            async with aclosing(self._calls.run(request, body)) as outputs:
                async for output in outputs:
                    if output.token_ids and not has_tokens:
                        has_tokens = True
                        self._drops.answered()
                    yield output
        except NotAcceptedError as error:
            self._note_drop(era, error, is_cut=isinstance(error.__cause__, UnreachableError))
            raise
        except UnreachableError as error:
            if not has_tokens:
                self._note_drop(era, error, is_cut=True)
            # The server has outlived the request. Where connections break before any token, it would be sent
            # for ever if that did not count.
            if has_tokens and await self._answers():
                raise RequestMovedError(str(error)) from error
            raise
        finally:
            self._end(request.adapter)

    async def add_adapter(self, spec: AdapterSpec) -> None:
        """See AsyncEngine. While the server is away this only notes the adapter: it will be known again
        before any request is. One that the server refuses stays noted until it is removed: the server may
        take it later."""
        if self._life.state is EngineState.STARTING:
            await self._life.takes_adapters.wait()
        self._life.raise_if_gone()
        self._adapters.note(spec)
        if self._life.state is EngineState.UNREACHABLE:
            return
        try:
            await self._adapters.load(spec.version)
        except EngineClosedError:
            raise
        except EngineDeadError:
            self._look.set()  # noted, and loaded when the server is there again

    async def stage_adapter(self, version: str) -> None:
        """See AsyncEngine. Another front may unload the version more than once meanwhile: when it loads the
        same one, and when it gives that up, as long as the registry does not have it."""
        try:
            await answer_once(self, version)
        except ModelUnknownError:
            self._adapters.doubt(version)
            await answer_once(self, version)

    async def remove_adapter(self, version: str) -> None:
        """See AsyncEngine. Also returns if the server goes away first; it then forgets the version when it is
        there again."""
        may_have_it = self._adapters.forget(version)
        if (use := self._uses.get(version)) is not None:
            await use.wait_idle()
        if not may_have_it or not self._life.takes_adapters.is_set():
            return
        if self._life.state is not EngineState.READY:
            return
        try:
            await self._adapters.unload(version)
        except EngineDeadError:
            self._look.set()

    async def stats(self) -> EngineStats:
        """See EngineClient.stats. All zero while the server is away."""
        age_s = self._clock.now_s() - self._stats_taken_s
        if self.healthy and age_s > self._options.stats_max_age_s:
            if self._stats_call is None or self._stats_call.done():
                self._stats_call = asyncio.create_task(self._read_stats())
            await asyncio.wait([self._stats_call], timeout=self._options.stats_timeout_s)
        return self._stats

    def _doubt(self, error: EngineDeadError) -> None:
        """A request went wrong in a way that may be the server's end."""
        if isinstance(error, UnreachableError) and error.nobody_listens:
            self._lose(str(error))
        self._look.set()

    def _note_drop(self, era: int, error: EngineDeadError, *, is_cut: bool) -> None:
        """A request was dropped before its first token. A server that is lost, or will be, is none that drops
        requests: the watch over it looks after that."""
        if not self._life.is_ready:
            return
        if self._drops.dropped(era, self._drops_in_words(error), is_cut=is_cut):
            logger.error("%s; it is sent none until it completes a prompt", self._drops.reason)

    def _drops_in_words(self, error: Exception) -> str:
        problem = str(error).partition("; ")[0]  # without its advice, which is another
        return f"the server at {self.url} says that it is well, but drops requests ({problem}); see its log"

    async def _check_completes(self) -> None:
        assert self.backend is not None
        timeout_s = min(self._options.call_timeout_s, _LOOK_TIMEOUT_S)
        await check_completes(self._http, self.backend, timeout_s=timeout_s)

    async def _set_aside_if_stuck(self) -> None:
        """Send a server no requests on which one has stalled, if it does not complete a prompt either: they
        would stall as well, each for a minute."""
        try:
            await self._check_completes()
        except BackendError as error:
            if self.healthy:
                self._drops.failed_again(self._drops_in_words(error))
                logger.error("%s; it is sent none until it completes a prompt", self._drops.reason)

    async def _try_again(self) -> None:
        """Send requests to a server that was set aside for dropping them, if it completes a prompt."""
        try:
            await self._check_completes()
        except BackendError as error:
            self._drops.failed_again(self._drops_in_words(error))
            return
        self._drops.try_again()
        logger.info("the server at %s completes prompts, and is sent requests again", self.url)

    def _begin(self, version: str | None) -> None:
        self._num_in_flight += 1
        if version is not None:
            self._uses.setdefault(version, VersionUse()).acquire()
            self._in_flight[version] = self._in_flight.get(version, 0) + 1

    def _end(self, version: str | None) -> None:
        self._num_in_flight -= 1
        if version is None:
            return
        self._uses[version].release()
        self._in_flight[version] -= 1
        if self._uses[version].idle:
            del self._uses[version], self._in_flight[version]

    async def _watch(self) -> None:
        """Look after the server until the replica is closed."""
        pause_s = self._options.first_pause_s
        while True:
            is_urgent = await self._wait_to_look(pause_s)
            try:
                if is_urgent or not self._heard_lately():
                    await self._check_health()
                if self._life.state is EngineState.UNREACHABLE or is_urgent:
                    # A server that broke a connection may have been started again since.
                    await self._bring_back()
                if self._life.is_ready and self._drops.is_due:
                    await self._try_again()
                self._retry_refused()
                pause_s = self._options.first_pause_s
            except (EngineDeadError, BackendError) as error:
                self._lose(str(error))
                pause_s = min(2 * pause_s, self._options.max_pause_s)
            except Exception:
                logger.exception("the watch over %s went wrong; it goes on", self.url)
                self._lose(f"the watch over {self.url} went wrong")
                pause_s = self._options.max_pause_s

    def _retry_refused(self) -> None:
        """Offer the server again what it refused, if it is time; not here, as that may take long."""
        now_s = self._clock.now_s()
        if not self.refused:
            self._retried_s = now_s  # what is refused from now on has just been tried
        elif now_s - self._retried_s >= self._options.refused_retry_s and (
            self._retry is None or self._retry.done()
        ):
            self._retried_s = now_s
            self._retry = asyncio.create_task(self._offer_refused())

    async def _offer_refused(self) -> None:
        try:
            await self._adapters.retry()
        except EngineDeadError:
            self._look.set()

    async def _wait_to_look(self, pause_s: float) -> bool:
        """Wait until it is time to look; returns whether there is a special reason to."""
        if self.healthy:
            pause_s = self._options.busy_interval_s if self._num_in_flight else self._options.idle_interval_s
        try:
            async with asyncio.timeout(pause_s):
                await self._look.wait()
        except TimeoutError:
            return False
        self._look.clear()
        # Many requests may fail one after the other, and a server that is away is not asked more often.
        await asyncio.sleep(self._options.first_pause_s if self.healthy else pause_s)
        return True

    def _heard_lately(self) -> bool:
        age_s = self._clock.now_s() - self._liveness.heard_s
        return self.healthy and age_s < self._options.busy_interval_s

    async def _check_health(self) -> None:
        """EngineDeadError unless the server is well, or sends tokens and is too busy to say so."""
        asked_s = self._clock.now_s()
        try:
            answer = await self._http.call("GET", "/health", timeout_s=self._options.silence_s)
        except UnreachableError as error:
            if not error.nobody_listens and self._liveness.heard_s > asked_s:
                return
            raise
        if answer.status != 200:
            message = error_detail(answer).message
            raise EngineDeadError(f"the server at {self.url} is not well (HTTP {answer.status}: {message})")
        self._liveness.heard()

    async def _answers(self) -> bool:
        """Tell whether the server is well, if it says so at once."""
        try:
            answer = await self._http.call("GET", "/health", timeout_s=_AT_ONCE_S)
        except UnreachableError:
            return False
        return answer.status == 200

    async def _bring_back(self) -> None:
        """Make sure that the server is the one that was there, with all adapters: before it serves again if
        it was away, else beside what it serves."""
        timeout_s = min(self._options.call_timeout_s, _LOOK_TIMEOUT_S)
        backend = await identify(self._http, self._expected, timeout_s=timeout_s)
        self._meet(backend)
        if self._life.state is EngineState.READY:
            if self._mending is not None:
                self._mending.cancel()  # the loads under way go on, and are joined
            self._mending = asyncio.create_task(self._mend(backend.adapters))
        elif self._life.state is EngineState.UNREACHABLE:
            await self._restore(backend.adapters)
            self._num_restarts += 1
            self.info = await self._ready(backend, self._clock.now_s())
            self._life.set(EngineState.READY, "")
            logger.info("the server at %s is back", self.url)

    async def _mend(self, served: Iterable[str]) -> None:
        try:
            await self._adapters.restore(served)
        except EngineDeadError:
            self._look.set()
        except Exception:
            logger.exception("the adapters of %s could not be looked after", self.url)

    async def _restore(self, served: Iterable[str]) -> None:
        """Bring the adapters of a server that was away up to date, and look after its health meanwhile: loads
        may take minutes. Raises EngineDeadError if it goes away again."""
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

    def _lose(self, reason: str) -> None:
        """The server is away. Its requests are lost, its adapters have to be looked for."""
        if self._life.state is EngineState.READY:
            logger.error("%s; looking for it until it is back", reason)
            self._life.set(EngineState.UNREACHABLE, reason)
            for task in (self._retry, self._mending):
                if task is not None:
                    task.cancel()  # what else it would load waits until the server is back
            self._adapters.give_up(reason)
            self._stats, self._stats_taken_s = EngineStats(), float("-inf")
            self._liveness.give_up(EngineDeadError(f"{reason}; send the request again"))
            self._look.set()
        elif self._life.state is EngineState.UNREACHABLE and reason != self._life.message:
            logger.warning("%s", reason)
            self._life.message = reason

    async def _fetch_stats(self) -> EngineStats | None:
        try:
            answer = await self._http.call("GET", "/metrics", timeout_s=self._options.stats_timeout_s)
        except UnreachableError:
            return None
        if answer.status != 200:
            return None
        try:
            return parse_stats(answer.body.decode("utf-8", "replace"), self._in_flight)
        except ValueError as error:
            logger.warning("the metrics of %s cannot be read: %s", self.url, error)
            return None

    async def _read_stats(self) -> None:
        era = self._liveness.era
        stats = await self._fetch_stats()
        if era == self._liveness.era:
            if stats is not None:
                self._stats = stats
                self._stalls.saw(stats)
            self._stats_taken_s = self._clock.now_s()

    async def _ready_backend(self) -> Backend:
        """Return the server as soon as it is ready; EngineDeadError if that takes too long or is hopeless."""
        await self._life.wait_ready(self._options.ready_timeout_s)
        assert self.backend is not None
        return self.backend


if TYPE_CHECKING:
    from loraplex.server.replica import Replica

    _conforms: Callable[..., Replica] = HttpReplica
