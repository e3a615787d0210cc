"""The HTTP process's view of the engine: another process, restarted when it dies.

                            SILENT ────────────┐
                              ▲ │ no sign of life, for a while or for too long
                              │ ▼              ▼
NEW ──start()──▶ STARTING ──▶ READY ◀──────────┐
                    │           │ child died   │ child ready again
                    ▼           ▼              │
                  FAILED ◀── RESTARTING ───────┘      close() leads to CLOSED from everywhere
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.clock import Clock, MonotonicClock
from loraplex.core.errors import EngineDeadError, LoraplexError, RequestMovedError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.engine.output_stream import Take, outputs_of
from loraplex.engine.staging import answer_once
from loraplex.server.continuing import EngineSilentError
from loraplex.server.engine_child import EngineChild, EngineHandle
from loraplex.server.engine_life import EngineLife
from loraplex.server.engine_status import SHUTTING_DOWN, EngineState, EngineStatus
from loraplex.server.engine_streams import EngineStreams
from loraplex.server.heartbeat import BEAT_S, Signs, Silence
from loraplex.server.pool.directory import NoPool, PoolMember
from loraplex.server.protocol_ipc import (
    AdapterAdded,
    AdapterRemoved,
    AddAdapter,
    AddRequest,
    Cancel,
    ErrorInfo,
    Event,
    GetStats,
    JoinPool,
    Outputs,
    PoolJoined,
    Prepare,
    Ready,
    Rejected,
    RemoveAdapter,
    SetTenants,
    StartProgress,
    Stats,
)
from loraplex.server.replica import Continuation
from loraplex.server.restart_policy import CrashHistory, RestartPolicy

logger = logging.getLogger(__name__)

DEFAULT_FACTORY: Final = "loraplex.engine.start:build_core"


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Timeouts and the environment. `silent_s`: seconds without a sign of life from the child until its
    requests are taken from it; `lost_s`: until it is killed. `env` is added to the child's environment."""

    ready_timeout_s: float = 60.0
    stats_max_age_s: float = 0.5
    stats_timeout_s: float = 2.0
    stop_grace_s: float = 10.0
    silent_s: float = 1.0
    lost_s: float = 5.0
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    env: Mapping[str, str] = field(default_factory=dict)


class EngineClient:
    """An AsyncEngine whose core runs in a supervised child process. For use in one event loop.

    `config` is the factory's argument: any type that msgspec encodes and the child can import. Adapters are
    remembered here and given to every new child, so they survive its crashes. `start_child` starts the child
    elsewhere than on this machine, and is given the callback for its events. `pool`: set for a replica that
    shares adapters in host memory with others. `name`: the name of the process in logs and errors.
    """

    def __init__(
        self,
        config: object,
        *,
        factory: str = DEFAULT_FACTORY,
        options: ClientOptions | None = None,
        clock: Clock | None = None,
        start_child: Callable[[Callable[[Event], None]], EngineHandle] | None = None,
        pool: PoolMember | None = None,
        name: str = "the engine process",
    ) -> None:
        self._config = config
        self._factory = factory
        self._options = options or ClientOptions()
        self._clock = clock or MonotonicClock()
        self._new_child = start_child or self._local_child
        self._pool = pool or NoPool()
        self._name = name
        self._crashes = CrashHistory(self._options.restart, self._clock)
        self._on_progress: Callable[[StartProgress], None] | None = None

        self._life = EngineLife("the engine was not started")
        self._num_restarts = 0
        self.failed = asyncio.Event()
        """Set when a started engine has died too often and is not started again."""
        self._progress: StartProgress | None = None
        self._child: EngineHandle | None = None
        self._supervisor: asyncio.Task[None] | None = None

        self._streams = EngineStreams()
        # By version and folder: a restarted engine must know every folder that holds a version.
        self._adapters: dict[str, dict[Path, AdapterSpec]] = {}
        self._tenants: tuple[TenantPolicy, ...] = ()
        self._additions: dict[str, asyncio.Future[None]] = {}
        self._removals: dict[str, asyncio.Future[None]] = {}
        self._stats = EngineStats()
        self._stats_taken_s = float("-inf")
        self._stats_reply: asyncio.Future[None] | None = None
        self._num_asked, self._num_answered = 0, 0  # requests for stats sent to the child, and replies
        self._back_with: int | None = None  # the reply after which a silent child counts as alive again
        self.info: Ready | None = None
        """The engine's description of itself when it was last ready."""

    @property
    def healthy(self) -> bool:
        return self._life.is_ready

    @property
    def status(self) -> EngineStatus:
        child = self._child if self.healthy else None
        return EngineStatus(
            state=self._life.state,
            message=self._life.message,
            num_restarts=self._num_restarts,
            pid=None if child is None else child.pid,
            node=None if child is None else child.node,
            phase=None if self._progress is None else self._progress.phase,
            fraction=None if self._progress is None else self._progress.fraction,
        )

    async def start(
        self,
        on_progress: Callable[[StartProgress], None] | None = None,
        add_adapters: Awaitable[object] | None = None,
    ) -> None:
        """Start the engine process and wait until it is ready.

        Raises the child's own error if it cannot start; a first start is not retried. `on_progress` is called
        for this start only, not for restarts. `add_adapters` ends when the adapters that the engine prepares
        for have been added.
        """
        assert self._life.state is EngineState.NEW, "an EngineClient is started once"
        self._on_progress = on_progress
        self._life.set(EngineState.STARTING, "the engine is starting")
        try:
            child = await self._start_child(add_adapters)
        except BaseException as error:
            self._life.set(EngineState.FAILED, str(error) or "the start was cancelled")
            raise
        finally:
            self._on_progress = None
        self._supervisor = asyncio.create_task(self._supervise(child), name="engine-supervisor")

    async def close(self) -> None:
        """Stop the engine process; requests in flight raise EngineClosedError. Idempotent."""
        self._life.set(EngineState.CLOSED, SHUTTING_DOWN)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        self._drop_in_flight(self._life.message)
        if self._child is not None:
            await self._child.stop(grace_s=self._options.stop_grace_s)

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See AsyncEngine. Waits for a restart in progress; outputs that a slow consumer missed are
        merged."""
        return outputs_of(self.open(request))

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[Take]:
        """See Replica."""
        child = await self._ready_child()
        request_id = request.request_id
        stream = self._streams.open(request_id)
        try:
            child.send(AddRequest(request, self._pool.begin(request.adapter)))
            yield stream.take
        finally:
            self._streams.close(request_id)
            self._pool.end(request.adapter)
            if not stream.is_finished:
                child.send(Cancel(request_id))

    @property
    def refused(self) -> Mapping[str, str]:
        """See Replica. Always empty: what one engine process refuses, all do."""
        return {}

    @property
    def stalled(self) -> Sequence[str]:
        """See Replica. Always empty: the process itself is watched, and replaced when it falls silent."""
        return ()

    @property
    def computes(self) -> bool:
        """See Replica."""
        return self.healthy

    def continuation(self, request: EngineRequest) -> Continuation:
        return Continuation.SAME

    def hand_over(self, request_id: str | None = None) -> None:
        """See Replica."""
        self._streams.fail(lambda: RequestMovedError(f"{self._name} hands its requests over"), request_id)

    def hand_over_stalled(self, request_ids: Sequence[str]) -> None:
        """See Replica. Does nothing: no request is ever reported as stalled."""

    async def add_adapter(self, spec: AdapterSpec) -> None:
        """See AsyncEngine. Overtakes a removal of the same version that is still in progress.

        While the engine restarts this only records the adapter, which the engine gets before any request.
        """
        if self._life.state is EngineState.STARTING:
            await self._life.takes_adapters.wait()
        self._life.raise_if_gone()
        self._adapters.setdefault(spec.version, {})[spec.path] = spec
        if self._child is None or not self._life.takes_adapters.is_set():
            return
        reply = self._additions.get(spec.version)
        if reply is None:
            reply = self._additions[spec.version] = asyncio.get_running_loop().create_future()
        # Sent even if another addition is in progress: it may have another folder.
        self._child.send(AddAdapter(spec, self._pool.holders(spec.version)))
        await asyncio.shield(reply)

    async def stage_adapter(self, version: str) -> None:
        """See AsyncEngine."""
        await answer_once(self, version)

    async def remove_adapter(self, version: str) -> None:
        """See AsyncEngine. Also returns if the engine dies first: the restarted engine never gets the
        version."""
        self._adapters.pop(version, None)
        self._pool.forget(version)
        if self._child is None or not self._life.takes_adapters.is_set() or self._life.is_gone:
            return
        reply = self._removals.get(version)
        if reply is None:
            reply = self._removals[version] = asyncio.get_running_loop().create_future()
        # Sent even if another removal is in progress: the version may have been added again since.
        self._child.send(RemoveAdapter(version))
        await asyncio.shield(reply)

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """See AsyncEngine."""
        self._tenants = tuple(policies)
        if self._child is not None and self._life.takes_adapters.is_set() and not self._life.is_gone:
            self._child.send(SetTenants(self._tenants))

    async def stats(self) -> EngineStats:
        """Return counters at most `stats_max_age_s` old, or the last ones if a long step delays the reply.

        All are zero while there is no engine; see `status`.
        """
        age_s = self._clock.now_s() - self._stats_taken_s
        if self._child is not None and self.healthy and age_s > self._options.stats_max_age_s:
            if self._stats_reply is None:
                self._stats_reply = asyncio.get_running_loop().create_future()
                self._ask_stats(self._child)
            await asyncio.wait([self._stats_reply], timeout=self._options.stats_timeout_s)
        return self._stats

    def _ask_stats(self, child: EngineHandle) -> None:
        child.send(GetStats())
        self._num_asked += 1

    def _on_event(self, event: Event) -> None:
        if type(event) is Outputs:
            self._streams.deliver(event.outputs)
            return
        match event:
            case Rejected(request_id, error):
                self._streams.reject(request_id, error.to_error())
            case AdapterAdded(version, problem):
                reply = self._additions.pop(version, None)
                if problem is not None:
                    self._adapters.pop(version, None)
                    if reply is None:  # after a restart nobody waits for the reply
                        logger.warning(
                            "adapter %s was refused by the engine: %s", version[:12], problem.message
                        )
                _settle(reply, problem)
            case AdapterRemoved(version, problem):
                _settle(self._removals.pop(version, None), problem)
            case PoolJoined(address):
                self._pool.opened(address)
            case Stats(stats):
                self._pool.saw(stats)
                self._stats, self._stats_taken_s = stats, self._clock.now_s()
                _settle(self._stats_reply)
                self._stats_reply = None
                self._num_answered += 1
                if self._life.state is EngineState.SILENT and self._num_answered == self._back_with:
                    logger.warning("%s answers again", self._name)
                    self._life.set(EngineState.READY, "")
            case StartProgress():
                self._progress = event
                if self._on_progress is None:
                    return
                try:
                    self._on_progress(event)
                except Exception:  # a progress bar must not cost us the following events
                    logger.exception("the progress of the start could not be shown")

    def _local_child(self, on_event: Callable[[Event], None]) -> EngineHandle:
        return EngineChild(
            factory=self._factory, config=self._config, env=self._options.env, on_event=on_event
        )

    async def _start_child(self, add_adapters: Awaitable[object] | None = None) -> EngineHandle:
        self._progress = None
        self._num_asked, self._num_answered = 0, 0
        child = self._new_child(self._on_event)
        self._child = child
        try:
            await child.loaded
            self._life.raise_if_gone()  # closed meanwhile
            if self._pool.keys is not None:
                child.send(JoinPool(self._pool.keys.public, self._pool.keys.secret))
            for version, sources in self._adapters.items():
                for spec in sources.values():
                    child.send(AddAdapter(spec, self._pool.holders(version)))
            if self._tenants:
                child.send(SetTenants(self._tenants))
            self._life.takes_adapters.set()
            if add_adapters is not None:
                await _unless_exited(add_adapters, child)
            child.send(Prepare())
            self.info = await child.ready
            self._life.raise_if_gone()
        except BaseException:
            self._life.takes_adapters.clear()
            self._drop_in_flight(f"{self._name} could not start")
            await child.stop(grace_s=self._options.stop_grace_s)
            raise
        self._crashes.started()
        self._progress = None
        self._life.set(EngineState.READY, "")
        return child

    async def _supervise(self, child: EngineHandle) -> None:
        """Replace the child whenever it ends, until it ends too often."""
        try:
            while True:
                await self._watch(child)
                self._life.takes_adapters.clear()
                self._life.set(EngineState.RESTARTING, f"{self._name} died ({child.exit_reason})")
                self._drop_in_flight(
                    f"{self._name} died while serving this request ({child.exit_reason}); "
                    "it is being restarted, send the request again"
                )
                child = await self._restart(child.exit_reason)
        except LoraplexError as error:
            self._life.set(EngineState.FAILED, str(error))
            logger.critical("%s", error)
            self.failed.set()
        except Exception:
            self._life.set(EngineState.FAILED, f"the supervision of {self._name} failed")
            logger.exception("%s", self._life.message)
            self.failed.set()

    async def _watch(self, child: EngineHandle) -> None:
        """Wait until the child has exited. A child that stays silent for too long is killed."""
        silence = Silence(silent_s=self._options.silent_s, lost_s=self._options.lost_s)
        is_killed = False
        while not child.exited.is_set():
            await child.wait_exited(timeout_s=BEAT_S)
            match silence.look(child.num_heard), self._life.state:
                case Signs.ALIVE, EngineState.SILENT:
                    if self._back_with is None:
                        # Its reply comes after everything it still sends for the requests taken from it.
                        self._ask_stats(child)
                        self._back_with = self._num_asked
                case Signs.SILENT, EngineState.READY:
                    self._fall_silent(child, silence.seconds)
                case Signs.LOST, _ if not is_killed:
                    child.kill(f"it gave no sign of life for {silence.seconds:g} s")
                    is_killed = True

    def _fall_silent(self, child: EngineHandle, seconds: float) -> None:
        """Handle a silent child: mark it as silent, and take its requests from it, since it may never
        answer."""
        message = f"{self._name} has given no sign of life for {seconds:g} s"
        logger.warning("%s", message)
        self._life.set(EngineState.SILENT, message)
        self._back_with = None
        self._pool.lost()
        for request_id in self._streams:
            child.send(Cancel(request_id))
        self._streams.fail(
            lambda: EngineSilentError(f"{message}, while it served this request; send the request again")
        )

    async def _restart(self, reason: str) -> EngineHandle:
        """Return a new child that is ready. Raises EngineDeadError when the restart policy gives up."""
        died_s = self._clock.now_s()
        delay_s = self._crashes.crashed(while_starting=False)
        while delay_s is not None:
            logger.error("%s died (%s); starting it again in %.2f s", self._name, reason, delay_s)
            await asyncio.sleep(delay_s)
            self._num_restarts += 1
            try:
                child = await self._start_child()
            except LoraplexError as error:
                reason = str(error)
                delay_s = self._crashes.crashed(while_starting=True)
            else:
                logger.info("%s serves again, %.1f s after it died", self._name, self._clock.now_s() - died_s)
                return child
        raise EngineDeadError(f"{self._name} died too often and is not started again ({reason})")

    async def _ready_child(self) -> EngineHandle:
        """Return the child as soon as it is ready. Raises EngineDeadError if that takes too long or cannot
        happen."""
        await self._life.wait_ready(self._options.ready_timeout_s)
        assert self._child is not None
        return self._child

    def _drop_in_flight(self, reason: str) -> None:
        """Fail or settle everything that waits for a child that is gone.

        Adapter changes are not lost with it: the next child gets added adapters, and not those being removed.
        """
        self._pool.closed()
        self._streams.fail(lambda: self._life.gone(reason))
        for reply in (*self._additions.values(), *self._removals.values(), self._stats_reply):
            _settle(reply)
        self._additions.clear()
        self._removals.clear()
        self._stats, self._stats_taken_s, self._stats_reply = EngineStats(), float("-inf"), None


async def _unless_exited(adding: Awaitable[object], child: EngineHandle) -> None:
    """Await something that needs the child, but no longer than the child lives."""
    task, exiting = asyncio.ensure_future(adding), asyncio.create_task(child.exited.wait())
    try:
        await asyncio.wait([task, exiting], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        exiting.cancel()


def _settle(reply: asyncio.Future[None] | None, problem: ErrorInfo | None = None) -> None:
    if reply is None or reply.done():
        return
    if problem is None:
        reply.set_result(None)
    else:
        reply.set_exception(problem.to_error())
