"""The state of a supervised engine, and how its waiters learn of changes."""

from __future__ import annotations

import asyncio

from loraplex.core.errors import EngineClosedError, EngineDeadError
from loraplex.server.engine_status import EngineState

ON_ITS_WAY = (
    EngineState.STARTING,
    EngineState.SILENT,
    EngineState.RESTARTING,
    EngineState.UNREACHABLE,
)
GONE = (EngineState.NEW, EngineState.FAILED, EngineState.CLOSED)


class EngineLife:
    """The state of an engine and the reason for it. CLOSED is final. For use in one event loop."""

    def __init__(self, message: str) -> None:
        self.state = EngineState.NEW
        self.message = message
        self._settled = asyncio.Event()  # set unless the engine is starting or recovering
        self.takes_adapters = asyncio.Event()
        """Set when the engine accepts adapters, and also when no engine ever will."""

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def is_gone(self) -> bool:
        """Return whether the engine is unusable, now and later."""
        return self.state in GONE

    def set(self, state: EngineState, message: str) -> None:
        """Enter a state, unless the engine is closed."""
        if self.state is EngineState.CLOSED:
            return
        self.state, self.message = state, message
        if state in ON_ITS_WAY:
            self._settled.clear()
        else:
            self._settled.set()
            self.takes_adapters.set()  # or no engine will ever take them; waiters check `state`

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the engine is ready. Raises EngineDeadError if that takes too long or cannot happen."""
        if self.state in ON_ITS_WAY:
            try:
                async with asyncio.timeout(timeout_s):
                    while self.state in ON_ITS_WAY:
                        await self._settled.wait()
            except TimeoutError:
                raise EngineDeadError(f"{self.message}; it is not ready yet, try again later") from None
        self.raise_if_gone()

    def raise_if_gone(self) -> None:
        if self.is_gone:
            raise self.gone(self.message)

    def gone(self, reason: str) -> EngineDeadError:
        """Return the error for requests whose engine is gone; its own type if it was closed on purpose."""
        return (EngineClosedError if self.state is EngineState.CLOSED else EngineDeadError)(reason)
