"""The engine as its callers see it: the step-driven core, and the asynchronous engine around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import EngineStats


class EngineCore(Protocol):
    """The engine proper: single-threaded, driven by `step`. No method but `step` and `prepare` takes long."""

    max_model_len: int
    """Tokens a request may have, prompt and output together."""

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises UserError or CapacityError if it can never run; nothing is queued then."""
        ...

    def cancel(self, request_id: str) -> None:
        """Free everything the request holds at once. Unknown or finished ids are ignored."""
        ...

    def add_adapter(self, spec: AdapterSpec) -> None:
        """Make a version known; weights are read when first needed. Idempotent."""
        ...

    def stage_adapter(self, version: str) -> None:
        """Read a known version to the host's memory ahead of its first request, if there is such a memory and
        room in it."""
        ...

    def remove_adapter(self, version: str) -> None:
        """Begin to forget a version: no new requests, freed when the last in-flight one ends."""
        ...

    def take_removed_adapters(self) -> Sequence[str]:
        """Versions whose removal was completed since the last call."""
        ...

    def has_work(self) -> bool:
        """Tell whether calling `step` can make progress. A read from a disk that does not answer is work only
        if it ends after all: ask again every second or so."""
        ...

    def step(self) -> Sequence[EngineOutput]:
        """Run one step: schedule, launch, land, update. A step that runs ahead is told by the next call.

        Waits a millisecond at most when all wait for loads.
        """
        ...

    @property
    def num_required(self) -> int:
        """How often `prepare` has to be called until steps with the adapters known take no longer than later
        ones will: the engine is ready at 0."""
        ...

    def prepare(self) -> bool:
        """While there is nothing to do, every second or so: compile or capture one thing that steps to come
        would wait for. False if nothing is left. Raises EngineDeadError if a part of the engine is gone."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class AsyncEngine(Protocol):
    """Token-level engine for asyncio callers. All methods are called from one event loop."""

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Outputs of one request until its finish_reason.

        An output without tokens or finish_reason may come first: the request is queued, and will not be
        refused any more. Closing the iterator early (aclose, cancellation) cancels the request and frees all
        it holds. Raises EngineDeadError if the engine ends first, UserError or CapacityError if the request
        can never run. A failure of this request alone while running arrives as an output with finish_reason
        ERROR and a message.
        """
        ...

    async def add_adapter(self, spec: AdapterSpec) -> None:
        """Make a version known. Weights are read when a request first needs them. Idempotent."""
        ...

    async def stage_adapter(self, version: str) -> None:
        """Have a known version read, verified and used once, wherever it would be served from.

        Raises AdapterError if its weights cannot be served, LoraplexError if the engine cannot tell.
        """
        ...

    async def remove_adapter(self, version: str) -> None:
        """Forget a version: returns after its in-flight requests ended and its memory is free."""
        ...

    async def stats(self) -> EngineStats: ...
