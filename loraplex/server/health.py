"""The answers of /health, /health/ready and /health/live, and those of a server that is still starting.

/health/live     200 from the first moment: the process runs, do not start another
/health/ready    200 when requests are served at full speed; 503 with the current phase before that, while
                 the engine restarts, or while all servers of a fleet refuse all of its adapters. If the
                 fleet's own engines or a single engine refuse them, it is 200 with the reason: the base
                 model is served, and another server started the same way would do no better.
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
from loraplex.server.page.files import is_page_path, page_response
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
    status: EngineStatus,
    why_no_adapters: str | None = None,
    *,
    is_ready_without: bool = True,
    note: str | None = None,
) -> Response:
    """Return the answer of /health/ready. `why_no_adapters`: why a ready engine serves none of its adapters;
    None if it serves any, or has none to serve. `is_ready_without`: it counts as ready nevertheless. `note`:
    what else should be known of a ready server."""
    if status.state is EngineState.READY and why_no_adapters is not None and not is_ready_without:
        return _not_ready(EngineDeadError(why_no_adapters), EngineState.STARTING, "adapters", None)
    if status.state is EngineState.READY:
        return _json(Health(message=why_no_adapters or note or msgspec.UNSET), 200)
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
    """The ASGI application that listens while the server starts. Until `app` is set to the real one, every
    request is answered with the progress of the start (`progress`); the request log and the web guard are
    already active."""

    def __init__(self, *, web: WebAccess, clock: Clock) -> None:
        guarded = WebGuardMiddleware(self._tell_progress, access=web)
        self.app: ASGIApp = RequestLogMiddleware(guarded, clock=clock)
        self.progress = StartProgress("starting")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    async def _tell_progress(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == LIVE_PATH:
            response = live_response()
        elif is_page_path(scope["path"]):
            response = page_response(scope)  # it shows the progress
        else:
            phase, fraction = self.progress.phase, self.progress.fraction
            message = f"the server is starting{progress_words(phase, fraction)}; try again later"
            error = ServerStartingError(message)
            note_refusal(scope, error)
            response = _not_ready(error, EngineState.STARTING, phase, fraction)
        await response(scope, receive, send)
