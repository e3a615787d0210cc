"""Clients that are idle or read far too slowly, while others are measured.

Idle clients hold a kept-alive connection. Slow readers have requested a long streamed answer and read
a few bytes of it now and then; by the time `bystanders` yields, the engine has finished their requests.
So whatever the measured clients lose is the cost of the connections, not of the tokens.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from loraplex.bench.client import BenchRequest, CompletionClient

_SLOW_READ_BYTES = 64
_SLOW_READ_PAUSE_S = 0.5
# Loopback would buffer a whole answer in the kernel. A small segment and a small window make the
# server see a slow reader as it would over a real network.
_SLOW_SEGMENT_BYTES = 536
_SLOW_WINDOW_BYTES = 2048


@asynccontextmanager
async def bystanders(
    base_url: str, *, num_idle: int, slow_requests: Sequence[BenchRequest], probe: BenchRequest
) -> AsyncIterator[None]:
    """Hold the connections for the length of the block.

    `probe` is read at full speed and must be as long as the slow requests: it is sent after them, so
    when it ends, theirs are generated too.
    """
    address = urlsplit(base_url)
    host, port = address.hostname, address.port
    assert host is not None
    assert port is not None
    idle = [await _open(host, port) for _ in range(num_idle)]
    slow = [await _open(host, port, slow=True) for _ in slow_requests]
    drips: list[asyncio.Task[None]] = []
    try:
        for connection in idle:
            await _ask(connection, b"GET /health HTTP/1.1\r\nHost: bench\r\n\r\n")
        for connection, request in zip(slow, slow_requests, strict=True):
            await _ask(connection, _post(request.body))
            drips.append(asyncio.create_task(_drip(connection)))
        async with CompletionClient(base_url) as client:
            record = await client.complete(probe)
            assert record.ok, record.error
        yield
        ended = [task for task in drips if task.done()]
        assert not ended, f"{len(ended)} slow readers lost their connection while others were measured"
    finally:
        for task in drips:
            task.cancel()
        await asyncio.gather(*drips, return_exceptions=True)
        for connection in (*idle, *slow):
            connection.close()


async def _open(host: str, port: int, *, slow: bool = False) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    if slow:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_WINDOW_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SLOW_SEGMENT_BYTES)
    await asyncio.get_running_loop().sock_connect(connection, (host, port))
    return connection


async def _ask(connection: socket.socket, request: bytes) -> None:
    """Send, and wait for the first byte of the answer: from then on the server holds the connection."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, request)
    if not await loop.sock_recv(connection, 1):
        raise ConnectionError("the server closed a bystander's connection")


async def _drip(connection: socket.socket) -> None:
    """Read slowly until the server closes the connection."""
    loop = asyncio.get_running_loop()
    while await loop.sock_recv(connection, _SLOW_READ_BYTES):
        await asyncio.sleep(_SLOW_READ_PAUSE_S)


def _post(body: bytes) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
