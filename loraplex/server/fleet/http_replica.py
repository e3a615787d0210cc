"""A replica that is a server already running elsewhere, stock vLLM or loraplex, used over HTTP.

This module handles its requests and adapters; `server_watch` tracks its state and its return.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.clock import Clock, MonotonicClock
from loraplex.core.errors import EngineClosedError, EngineDeadError, RequestMovedError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.engine.output_stream import Take, outputs_of
from loraplex.engine.staging import answer_once
from loraplex.server.continuing import EngineSilentError
from loraplex.server.engine_status import EngineState, EngineStatus
from loraplex.server.fleet.backend_adapters import BackendAdapters, adapter_name
from loraplex.server.fleet.backend_errors import ModelUnknownError, NotAcceptedError
from loraplex.server.fleet.backend_http import BackendAddress, BackendHttp, UnreachableError
from loraplex.server.fleet.backend_identity import ExpectedBase
from loraplex.server.fleet.completion_body import completion_body, continuation
from loraplex.server.fleet.completion_calls import CompletionCalls
from loraplex.server.fleet.fair_turns import WaitForTurns
from loraplex.server.fleet.http_replica_options import HttpReplicaOptions
from loraplex.server.fleet.requests_in_flight import RequestsInFlight
from loraplex.server.fleet.server_watch import ServerWatch
from loraplex.server.fleet.stalled_streams import StreamWait
from loraplex.server.protocol_ipc import Ready, StartProgress
from loraplex.server.replica import Continuation


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
        options, clock = options or HttpReplicaOptions(), clock or MonotonicClock()
        self._http = BackendHttp(address)
        self._in_flight = RequestsInFlight()
        self._adapters = BackendAdapters(
            self._http,
            timeout_s=options.load_timeout_s,
            num_at_once=options.num_loads_at_once,
            seen_path=options.seen_path,
            is_registered=options.is_registered,
            in_use=self._in_flight.has,
        )
        self._turns = turns = WaitForTurns(clock)
        watch = ServerWatch(self._http, expected, self._adapters, self._in_flight, turns, options, clock)
        self._watch = watch
        self._calls = CompletionCalls(
            self._http,
            self._adapters,
            watch.liveness,
            watch.stalls,
            self._turns,
            clock,
            vocab_size=options.vocab_size,
            on_first_token=watch.drops.answered,
            on_trouble=watch.doubt,
        )
        self.failed = asyncio.Event()
        """Never set: the server is restarted by its operator."""

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def healthy(self) -> bool:
        return self._watch.healthy

    @property
    def status(self) -> EngineStatus:
        return self._watch.status

    @property
    def info(self) -> Ready | None:
        return self._watch.info

    @property
    def refused(self) -> Mapping[str, str]:
        """See Replica."""
        return self._adapters.refused

    @property
    def stalled(self) -> Sequence[str]:
        """See Replica."""
        return self._calls.stalled()

    @property
    def computes(self) -> bool:
        """See Replica."""
        return self._calls.computes()

    def continuation(self, request: EngineRequest) -> Continuation:
        """See Replica."""
        assert self._watch.backend is not None, "a request that has begun is sent to a server that was there"
        return continuation(request, self._watch.backend.kind)

    def hand_over(self, request_id: str | None = None) -> None:
        """See Replica."""
        error = RequestMovedError(f"the fleet takes its requests away from {self.url}")
        if request_id is None:
            self._watch.liveness.give_up(error)
        else:
            self._calls.give_up(request_id, error)

    def hand_over_stalled(self, request_ids: Sequence[str]) -> None:
        """See Replica."""
        self._watch.note_stall()
        reason = (
            f"the server at {self.url} says that it is well, but sent nothing of it for too long; see its log"
        )
        for request_id in request_ids:
            self._calls.give_up(request_id, EngineSilentError(reason))
        if not self.healthy:  # they would stall too
            self._calls.give_up_waiting(RequestMovedError(reason))

    async def start(
        self,
        on_progress: Callable[[StartProgress], None] | None = None,
        add_adapters: Awaitable[object] | None = None,
    ) -> None:
        """See SupervisedEngine. Raises BackendError, with the fix in it, if the server cannot be used."""
        await self._watch.start(on_progress, add_adapters)

    async def close(self) -> None:
        """See SupervisedEngine. Requests of this replica are cancelled on the server."""
        await self._watch.close()
        await self._adapters.close()
        await self._http.close()

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See AsyncEngine. Outputs that a slow consumer missed are merged."""
        return outputs_of(self.open(request))

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[Take]:
        """See Replica."""
        backend = await self._watch.ready_backend()
        model = backend.base_model if request.adapter is None else adapter_name(request.adapter)
        body = completion_body(request, model=model, kind=backend.kind, max_model_len=backend.max_model_len)
        self._in_flight.begin(request.adapter)
        wait, era = StreamWait(request.num_tokens), self._watch.drops.era

        def note_sent() -> None:
            nonlocal era
            era = self._watch.drops.era

        try:
            async with self._calls.open(request, body, note_sent) as (take, wait):
                yield take
        except NotAcceptedError as error:
            self._watch.note_drop(era, error, is_cut=isinstance(error.__cause__, UnreachableError))
            raise
        except UnreachableError as error:
            if not wait.has_tokens:
                self._watch.note_drop(era, error, is_cut=True)
            # The server has outlived the request. Errors before any token must count as deaths, or the
            # request would be sent forever.
            if wait.has_tokens and await self._watch.answers():
                raise RequestMovedError(str(error)) from error
            raise
        finally:
            self._in_flight.end(request.adapter)

    async def add_adapter(self, spec: AdapterSpec) -> None:
        """See AsyncEngine. While the server is away this only records the adapter, which is loaded before any
        request is sent. One that the server refuses stays wanted until it is removed: the server may accept
        it later."""
        if self._watch.life.state is EngineState.STARTING:
            await self._watch.life.takes_adapters.wait()
        self._watch.life.raise_if_gone()
        self._adapters.note(spec)
        if self._watch.life.state is EngineState.UNREACHABLE:
            return
        try:
            await self._adapters.load(spec.version)
        except EngineClosedError:
            raise
        except EngineDeadError:
            self._watch.look.set()  # recorded, and loaded when the server is back

    async def stage_adapter(self, version: str) -> None:
        """See AsyncEngine. Another front may unload the version more than once meanwhile: when it loads the
        same one, and when it gives that up, as long as the version is not in the registry."""
        try:
            await answer_once(self, version)
        except ModelUnknownError:
            self._adapters.doubt(version)
            await answer_once(self, version)

    async def remove_adapter(self, version: str) -> None:
        """See AsyncEngine. Also returns if the server goes away first; the version is then unloaded when it
        is back."""
        may_have_it = self._adapters.forget(version)
        await self._in_flight.wait_idle(version)
        if not may_have_it or not self._watch.life.takes_adapters.is_set():
            return
        if self._watch.life.state is not EngineState.READY:
            return
        try:
            await self._adapters.unload(version)
        except EngineDeadError:
            self._watch.look.set()

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """See AsyncEngine. The server knows no tenants: their requests wait in front of it (`fair_turns`)."""
        self._turns.set_tenants(policies)

    async def stats(self) -> EngineStats:
        """See EngineClient.stats. All are zero while the server is away."""
        return await self._watch.stats()


if TYPE_CHECKING:
    from loraplex.server.replica import Replica

    _conforms: Callable[..., Replica] = HttpReplica
