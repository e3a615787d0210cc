"""The engine as its callers see it: the step-driven core, and the asynchronous engine around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.core.tenants import TenantPolicy


class EngineCore(Protocol):
    """The engine proper: single-threaded, driven by `step`. Only `step` and `prepare` may take long."""

    max_model_len: int
    """Most tokens of a request, prompt and output together."""

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises UserError or CapacityError if it can never run; nothing is queued then."""
        ...

    def cancel(self, request_id: str) -> None:
        """Free everything the request holds at once. Unknown or finished ids are ignored."""
        ...

    def add_adapter(self, spec: AdapterSpec) -> None:
        """Register a version; its weights are read when first needed. Idempotent."""
        ...

    def stage_adapter(self, version: str) -> None:
        """Read a known version into host memory ahead of its first request, if there is a host tier with room
        for it."""
        ...

    def remove_adapter(self, version: str) -> None:
        """Begin to remove a version: it gets no new requests, and is freed when the last one in flight
        ends."""
        ...

    def take_removed_adapters(self) -> Sequence[str]:
        """Return the versions whose removal was completed since the last call."""
        ...

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """Replace the shares, priorities and objectives of tenants; requests of others have a share of 1."""
        ...

    def has_work(self) -> bool:
        """Return whether calling `step` can make progress. An overdue read is work only once it has ended
        after all: ask again every second or so."""
        ...

    def step(self) -> Sequence[EngineOutput]:
        """Run one step: schedule, launch, land, update. The outputs of a step that runs ahead come with the
        next call.

        Waits at most a millisecond when all requests wait for loads.
        """
        ...

    @property
    def num_required(self) -> int:
        """Number of calls of `prepare` needed until steps with the known adapters are as fast as later ones:
        the engine is ready at 0."""
        ...

    def prepare(self) -> bool:
        """Compile or capture one thing that later steps would wait for; to be called when idle, every second
        or so. Return False if nothing is left. Raises EngineDeadError if a process of the engine has
        ended."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class AsyncEngine(Protocol):
    """Token-level engine for asyncio callers. All methods are called from one event loop."""

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Yield the outputs of one request until its finish_reason.

        An output without tokens or finish_reason may come first: the request is queued, and will not be
        refused any more. Closing the iterator early (aclose, cancellation) cancels the request and frees all
        it holds. Raises EngineDeadError if the engine ends first, UserError or CapacityError if the request
        can never run. A failure of this request alone while running arrives as an output with finish_reason
        ERROR and a message.
        """
        ...

    async def add_adapter(self, spec: AdapterSpec) -> None:
        """Register a version. Its weights are read when a request first needs them. Idempotent."""
        ...

    async def stage_adapter(self, version: str) -> None:
        """Read, verify and use a known version once, wherever it would be served from.

        Raises AdapterError if its weights cannot be served, LoraplexError if the engine cannot tell.
        """
        ...

    async def remove_adapter(self, version: str) -> None:
        """Remove a version; return after its requests in flight have ended and its memory is free."""
        ...

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """Replace the rights of tenants: shares and priorities for requests that are waiting, too, objectives
        for later ones only. They outlive the engine's process."""
        ...

    async def stats(self) -> EngineStats: ...
