"""An engine that a server starts, supervises and stops: an engine process, a fleet, or a server elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from loraplex.engine.interface import AsyncEngine
from loraplex.server.continuing import Continued
from loraplex.server.engine_status import EngineStatus
from loraplex.server.protocol_ipc import Ready, StartProgress
from loraplex.server.shadow_twin import Shadowed
from loraplex.server.waiting import Forecaster


class SupervisedEngine(AsyncEngine, Protocol):
    """An AsyncEngine with a life cycle: it is started once, may die and come back, and is closed at the end.

    Adapters that were added are known again after a restart.
    """

    failed: asyncio.Event
    """Set when a started engine has died too often and is not started again."""

    @property
    def info(self) -> Ready | None:
        """The engine's description of itself when it was last ready."""
        ...

    @property
    def healthy(self) -> bool:
        """Return whether it takes requests now."""
        ...

    @property
    def status(self) -> EngineStatus: ...

    async def start(
        self,
        on_progress: Callable[[StartProgress], None] | None = None,
        add_adapters: Awaitable[object] | None = None,
    ) -> None:
        """Start the engine and wait until it is ready for the adapters that `add_adapters` adds meanwhile.

        Raises LoraplexError if it cannot start; a first start is not retried.
        """
        ...

    async def close(self) -> None:
        """Stop it; requests in flight raise EngineClosedError. Idempotent."""
        ...


class ServingEngine(SupervisedEngine, Forecaster, Shadowed, Protocol):
    """The engine behind a server: a SupervisedEngine that predicts its own behaviour.

    Its requests outlive the processes that compute them.
    """

    @property
    def continued(self) -> Counter[Continued]:
        """Counts of requests continued elsewhere, by reason."""
        ...

    def is_resampled(self, call_id: str) -> bool:
        """Return whether an answer of a call with a seed was continued elsewhere with different random draws.
        Valid for calls that are open or were just answered."""
        ...
