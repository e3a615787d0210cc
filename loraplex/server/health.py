"""What /health, /health/ready and /health/live answer, and what a server answers that still starts.

/health/live     200 from the first moment: the process is there, do not start another
/health/ready    200 when requests are served at full speed; 503 with what is being done before that, and
                 while the engine restarts. /health is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.core.errors import EngineDeadError
from loraplex.server.engine_status import EngineState, EngineStatus, progress_words
from loraplex.server.errors import ServerStartingError, describe
from loraplex.server.protocol_ipc import StartProgress
from loraplex.server.responses import Health, NotReady

LIVE_PATH: Final = "/health/live"
READY_PATHS: Final = ("/health", "/health/ready")


def live_response() -> Response:
    return _json(Health(), 200)


def ready_response(status: EngineStatus) -> Response:
    if status.state is EngineState.READY:
        return _json(Health(), 200)
    return _not_ready(EngineDeadError(status.explain()), status.state, status.phase, status.fraction)


def _not_ready(
    reason: EngineDeadError, state: EngineState, phase: str | None, fraction: float | None
) -> Response:
    error = describe(reason)
    body = NotReady(error=error.detail, status=state.value, phase=phase, fraction=fraction)
    return _json(body, error.status, error.headers)


def _json(body: msgspec.Struct, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json"
    )


@dataclass(kw_only=True)
class FrontApp:
    """An ASGI application to listen with before there is one: until `app` is set, it says how far the start
    has come. `progress` is what is being done."""

    app: ASGIApp | None = None
    progress: StartProgress = field(default_factory=lambda: StartProgress("starting"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            response = live_response() if scope["path"] == LIVE_PATH else self._not_ready()
            await response(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})  # try again later

    def _not_ready(self) -> Response:
        phase, fraction = self.progress.phase, self.progress.fraction
        message = f"the server is starting{progress_words(phase, fraction)}; try again later"
        return _not_ready(ServerStartingError(message), EngineState.STARTING, phase, fraction)
