"""One connection to the server's HTTP protocol, without a server, and applications behind it."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from loraplex.core.clock import Clock, ManualClock
from loraplex.server.connections import ConnectionBook, ConnectionLimits
from loraplex.server.http_protocol import BoundedHttpProtocol


@asynccontextmanager
async def connection_to(
    app: ASGIApp,
    limits: ConnectionLimits | None = None,
    *,
    clock: Clock | None = None,
    book: ConnectionBook | None = None,
    keep_alive_s: int = 30,
) -> AsyncIterator[tuple[BoundedHttpProtocol, socket.socket]]:
    """The server's end of a connection, whose requests `app` answers, and the client's end."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=keep_alive_s,
    )
    book = book or ConnectionBook(limits or ConnectionLimits(), clock or ManualClock())
    protocol = BoundedHttpProtocol(config=config, server_state=ServerState(), app_state={}, book=book)
    ours, clients = socket.socketpair()
    with clients:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, ours)
        try:
            yield protocol, clients
        finally:
            transport.abort()


class Unanswered:
    """An application that has not answered its first request yet."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.asked = asyncio.Event()
        self.was_left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        self.asked.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.was_left.set()


class AnsweredLater:
    """An application that answers when `may_answer` is set."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.may_answer.wait()
        await Response(b"here you are")(scope, receive, send)


def read_responses(connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Return status and body of consecutive answers, each with a Content-Length."""
    responses = []
    with connection.makefile("rb") as answers:
        for _ in range(count):
            status = int(answers.readline().split()[1])
            headers = http.client.parse_headers(answers)
            responses.append((status, answers.read(int(headers["content-length"]))))
    return responses
