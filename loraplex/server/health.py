"""What /health, /health/ready and /health/live answer, and what a server answers that still starts.

/health/live     200 from the first moment: the process is there, do not start another
/health/ready    200 when requests are served at full speed; 503 with what is being done before that, and
                 while the engine restarts, or while all servers of a fleet refuse all of its adapters.
                 Where the fleet's own engines do, or the only one does, it is 200 with the reason: the base
                 model is served, and another server that is started alike would do no better.
                 /health is the same.
"""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.core.clock import Clock
from loraplex.core.errors import EngineDeadError
from loraplex.server.engine_status import EngineState, EngineStatus, progress_words
from loraplex.server.errors import ServerStartingError, describe
from loraplex.server.protocol_ipc import StartProgress
from loraplex.server.refusal import note_refusal
from loraplex.server.request_log import RequestLogMiddleware
from loraplex.server.responses import Health, NotReady
from loraplex.server.web_guard import WebAccess, WebGuardMiddleware

LIVE_PATH: Final = "/health/live"
READY_PATHS: Final = ("/health", "/health/ready")


def live_response() -> Response:
    return _json(Health(), 200)


def ready_response(
    status: EngineStatus, why_no_adapters: str | None = None, *, is_ready_without: bool = True
) -> Response:
    """`why_no_adapters`: why an engine that is ready serves none of its adapters, None if it serves any, or
    is to serve none. `is_ready_without`: it is ready all the same."""
    if status.state is EngineState.READY and why_no_adapters is not None and not is_ready_without:
        return _not_ready(EngineDeadError(why_no_adapters), EngineState.STARTING, "adapters", None)
    if status.state is EngineState.READY:
        return _json(Health(message=why_no_adapters or msgspec.UNSET), 200)
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


class FrontApp:
    """An ASGI application to listen with before there is one. Until `app` is set to that, every request is
    told how far the start has come; the request log and the guard against web pages are there already.
    `progress` is what is being done."""

    def __init__(self, *, web: WebAccess, clock: Clock) -> None:
        guarded = WebGuardMiddleware(self._tell_progress, access=web)
        self.app: ASGIApp = RequestLogMiddleware(guarded, clock=clock)
        self.progress = StartProgress("starting")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    async def _tell_progress(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == LIVE_PATH:
            response = live_response()
        else:
            phase, fraction = self.progress.phase, self.progress.fraction
            message = f"the server is starting{progress_words(phase, fraction)}; try again later"
            error = ServerStartingError(message)
            note_refusal(scope, error)
            response = _not_ready(error, EngineState.STARTING, phase, fraction)
        await response(scope, receive, send)
