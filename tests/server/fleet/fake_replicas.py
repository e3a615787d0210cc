"""Replicas in this process that answer as the fake core does, a token at a time, and die when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from fake_core import tokens_of

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import EngineClosedError, EngineDeadError, RequestMovedError, UnknownModelError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.engine.output_stream import Take
from loraplex.server.engine_status import EngineState, EngineStatus
from loraplex.server.protocol_ipc import Ready, StartProgress
from loraplex.server.replica import Continuation


class FakeReplica:
    """A replica in this process. `staged`: versions that it was asked to load, in order. `pause`: streams
    wait while it is cleared."""

    def __init__(self) -> None:
        self.state = EngineState.NEW
        self.message = ""
        self.num_steps = 0
        self.stats_gate: asyncio.Event | None = None  # its next report waits for this
        self.failed = asyncio.Event()
        self.info: Ready | None = None
        self.num_restarts = 0
        self.memory_bytes = 0  # for adapters of 64 bytes each; 0 if it does not report it
        self.known: set[str] = set()
        self.held: set[str] = set()
        self.staged: list[str] = []
        self.tenants: Sequence[TenantPolicy] = ()
        self.can_stage = True
        self.refused: dict[str, str] = {}
        self.stalled: list[str] = []
        self.computes = True
        self.pause = asyncio.Event()
        self.pause.set()
        self.streams: dict[str, Exception | None] = {}

    @property
    def healthy(self) -> bool:
        return self.state is EngineState.READY

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(state=self.state, message=self.message, num_restarts=self.num_restarts, pid=None)

    async def start(
        self,
        on_progress: Callable[[StartProgress], None] | None = None,
        add_adapters: Awaitable[object] | None = None,
    ) -> None:
        if add_adapters is not None:
            await add_adapters
        self.info = Ready(num_kv_blocks=1000, max_model_len=4096, load_s=0.0)
        self.state = EngineState.READY

    async def close(self) -> None:
        self.state = EngineState.CLOSED
        self._end(EngineClosedError("closed"))

    def die(self) -> None:
        self.state = EngineState.RESTARTING
        self.held.clear()
        self._end(EngineDeadError("died"))

    def give_up(self) -> None:
        self.die()
        self.state = EngineState.FAILED
        self.failed.set()

    def come_back(self) -> None:
        self.state = EngineState.READY

    def _end(self, error: Exception) -> None:
        for request_id in self.streams:
            self.streams[request_id] = error
        self.pause.set()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        if not self.healthy:
            raise EngineDeadError("not there")
        if request.adapter is not None and request.adapter not in self.known:
            raise UnknownModelError(f"no adapter {request.adapter}")
        if request.adapter is not None:
            self.held.add(request.adapter)
        request_id, whole = request.request_id, tokens_of(request)
        assert request_id not in self.streams
        self.streams[request_id] = None
        try:
            yield EngineOutput(request_id=request_id)
            for place in range(len(request.output_token_ids), len(whole)):
                await self.pause.wait()
                await asyncio.sleep(0)
                if (error := self.streams[request_id]) is not None:
                    raise error
                reason = FinishReason.LENGTH if place == len(whole) - 1 else None
                yield EngineOutput(request_id=request_id, token_ids=(whole[place],), finish_reason=reason)
        finally:
            del self.streams[request_id]

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[Take]:
        async with aclosing(self.generate(request)) as outputs:
            yield outputs.__anext__

    def continuation(self, request: EngineRequest) -> Continuation:
        return Continuation.SAME

    def hand_over(self, request_id: str | None = None) -> None:
        for each in self.streams:
            if request_id in (None, each):
                self.streams[each] = RequestMovedError("handed over")

    def hand_over_stalled(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.hand_over(request_id)

    async def add_adapter(self, spec: AdapterSpec) -> None:
        self.known.add(spec.version)

    async def stage_adapter(self, version: str) -> None:
        await asyncio.sleep(0)
        if not self.healthy or not self.can_stage:
            raise EngineDeadError("not there")
        if version not in self.known:
            raise UnknownModelError(f"no adapter {version}")
        self.staged.append(version)
        self.held.add(version)

    async def remove_adapter(self, version: str) -> None:
        self.known.discard(version)
        self.held.discard(version)

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        self.tenants = policies

    async def stats(self) -> EngineStats:
        rows = [
            AdapterStats(
                version=version,
                tier="host" if version in self.held else "disk",
                num_bytes=64,
                in_flight=0,
                loads=0,
            )
            for version in sorted(self.known)
        ]
        reported = EngineStats(
            adapters=tuple(rows), num_steps=self.num_steps, host_adapter_budget_bytes=self.memory_bytes
        )
        if (gate := self.stats_gate) is not None:
            self.stats_gate = None
            await gate.wait()
        return reported
