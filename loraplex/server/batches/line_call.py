"""Requests to the routes of this server, without a network, in the name of a tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.server.deps import ServerDeps
from loraplex.server.errors import install_error_handlers
from loraplex.server.generation_routes import generation_router
from loraplex.server.request_log import BATCH_KIND, RequestLogMiddleware, new_request_id, request_record
from loraplex.server.tenants.access import Access, access_of, grant


def line_app(deps: ServerDeps) -> ASGIApp:
    """Return the routes that answer lines of batches: those of the server, without its checks of where a
    request comes from."""
    app = FastAPI(openapi_url=None)
    app.include_router(generation_router(deps))
    install_error_handlers(app)
    app.add_middleware(_SenderMiddleware)
    return RequestLogMiddleware(app.build_middleware_stack(), clock=deps.metrics.clock, traces=deps.traces)


class _SenderMiddleware:
    """Notes whose request it is, as the check of keys does for requests that have one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = request_record(scope)
        record.key_kind, record.tenant = BATCH_KIND, access_of(scope).tenant or None
        await self._app(scope, receive, send)


@dataclass
class LineCall:
    """One request, and its answer when `run` has returned. It is sent once."""

    url: str
    content: bytes
    access: Access
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    request_id: str = field(default_factory=new_request_id)
    _scope: dict[str, Any] = field(default_factory=dict)
    _is_sent: bool = False

    async def run(self, app: ASGIApp) -> None:
        """Raises what the server failed with."""
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self.url,
            "raw_path": self.url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(self.content)).encode()),
                (b"x-request-id", self.request_id.encode()),
            ],
            "client": None,
            "server": None,
        }
        grant(self._scope, self.access)
        await app(self._scope, self._receive, self._send)

    @property
    def waits(self) -> bool:
        """Return whether its first token has not come."""
        if not self._scope:
            return True
        meter = request_record(self._scope).meter
        return meter is None or meter.ttft_s is None

    async def _receive(self) -> Message:
        if self._is_sent:
            await asyncio.get_running_loop().create_future()  # no client hangs up
        self._is_sent = True
        return {"type": "http.request", "body": self.content, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
        else:
            self.body += message.get("body", b"")
