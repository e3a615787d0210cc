"""The requests that hold an adapter version, and a way to wait for the last of them."""

from __future__ import annotations

import asyncio


class VersionUse:
    """A count of leases, with an event that is set at zero."""

    def __init__(self) -> None:
        self._num_leases = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def idle(self) -> bool:
        return self._num_leases == 0

    def acquire(self) -> None:
        self._num_leases += 1
        self._idle.clear()

    def release(self) -> None:
        assert self._num_leases > 0, "released more often than acquired"
        self._num_leases -= 1
        if self._num_leases == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()


class Lease:
    """A request's lease on the model it asked for. `name` and `version` are None for the base model."""

    def __init__(
        self, *, name: str | None, version: str | None, use: VersionUse | None, is_canary: bool = False
    ) -> None:
        self.name = name
        self.version = version
        self.is_canary = is_canary
        self._use = use
        if use is not None:
            use.acquire()

    def release(self) -> None:
        """Release the lease. Idempotent."""
        if self._use is not None:
            self._use.release()
            self._use = None
