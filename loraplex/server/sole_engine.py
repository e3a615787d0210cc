"""An engine process that has none beside it: its requests wait for the next one, and go on there."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.server.continuing import continuing
from loraplex.server.engine_client import EngineClient

_MAX_DEATHS: Final = 2
"""As many engine processes may die with a request before it is given up. Fewer than the crashes that end the
server (`RestartPolicy`): one request that is the reason must not do that."""


class SoleEngine(EngineClient):
    """An EngineClient whose requests outlive the engine process."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        return continuing(request, self._give, max_deaths=_MAX_DEATHS, engines="engine processes")

    async def _give(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        await self._ready_child()  # raises if there will be none
        return super().generate(request)
