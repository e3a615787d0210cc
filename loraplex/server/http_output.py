"""Writes to a connection that uvicorn does not do: refusals, streams to HTTP/1.0 clients, and responses to
clients that wait for 100 Continue."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from loraplex.server.errors import HttpError
from loraplex.server.request_log import REQUEST_ID_HEADER


def refusal_bytes(error: HttpError, request_id: str) -> bytes:
    """Return a response that is sent without the application and ends the connection."""
    body = error.body()
    head = [
        f"HTTP/1.1 {error.status} {error.reason}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        f"{REQUEST_ID_HEADER.decode()}: {request_id}",
        *(f"{name}: {value}" for name, value in error.headers.items() if name != "connection"),
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def send_until_close(cycle: RequestResponseCycle) -> None:
    """Send a response of unknown length unchunked, since HTTP/1.0 has no chunks. It ends when the connection
    is closed, which uvicorn does after each response to such a request."""
    send, has_length = cycle.send, True

    async def send_plainly(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(
                message.get("body", b"")
            )  # uvicorn checks each part against it
        await send(message)

    cycle.send = send_plainly  # type: ignore[method-assign]


def close_unless_continued(cycle: RequestResponseCycle) -> None:
    """Close the connection after this response if its client was never told to send the body (100 Continue):
    the body may still come, so it is unknown where the next request would begin."""
    send = cycle.send

    async def send_and_close(message: Any) -> None:
        if cycle.waiting_for_100_continue and cycle.more_body:
            cycle.keep_alive = False
        await send(message)

    cycle.send = send_and_close  # type: ignore[method-assign]
