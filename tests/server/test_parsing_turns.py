"""Connections share each iteration of the loop: how much input is parsed in it, and whose first."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import AsyncExitStack

from http_connections import AnsweredLater, Unanswered, connection_to, read_responses
from starlette.types import ASGIApp, Receive, Scope, Send
from test_connections import CHUNKED, HEALTH
from test_live_server import request_bytes

from loraplex.core.clock import ManualClock
from loraplex.server.connections import ConnectionBook, ConnectionLimits
from loraplex.server.http_protocol import BoundedHttpProtocol


class TickingClock:
    """A clock on which a millisecond passes with each reading."""

    def __init__(self) -> None:
        self._num_looks = 0

    def now_s(self) -> float:
        self._num_looks += 1
        return self._num_looks / 1000


async def receive_body(receive: Receive) -> list[bytes]:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message["body"])
        more = message["more_body"]
    return parts


def test_small_chunks_are_parsed_in_several_turns_of_the_loop() -> None:
    async def run() -> None:
        parts: list[bytes] = []
        is_complete = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            parts.extend(await receive_body(receive))
            is_complete.set()

        async with connection_to(app, clock=TickingClock()) as (protocol, _):
            protocol.data_received(CHUNKED + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
            await asyncio.wait_for(is_complete.wait(), 30)
        assert b"".join(parts) == b"x" * 20_000
        assert max(map(len, parts)) < 5000

    asyncio.run(run())


def test_connections_share_the_time_to_parse_of_each_turn() -> None:
    num_connections, num_chunks = 20, 5000

    async def run() -> None:
        app = AnsweredLater()
        book = ConnectionBook(ConnectionLimits(), TickingClock())
        async with AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(connection_to(app, book=book)) for _ in range(num_connections)
            ]
            protocols = [protocol for protocol, _ in opened]
            for protocol in protocols:
                protocol.data_received(CHUNKED)
                await asyncio.sleep(0)
            for protocol in protocols:
                protocol.data_received(b"1\r\nx\r\n" * num_chunks)
            per_turn = [num_parsed(protocols)]
            while sum(per_turn) < num_connections * num_chunks:
                await asyncio.sleep(0)
                per_turn.append(num_parsed(protocols))
            assert max(per_turn) < num_chunks

    def num_parsed(protocols: list[BoundedHttpProtocol]) -> int:
        """Return the bytes of bodies that were parsed since the last call."""
        count = sum(len(protocol.cycle.body) for protocol in protocols)
        for protocol in protocols:
            protocol.cycle.body.clear()
        return count

    asyncio.run(run())


async def opened_beside(
    stack: AsyncExitStack, app: ASGIApp, num_connections: int
) -> list[BoundedHttpProtocol]:
    """Connections that share a parser which does one slice in each iteration of the loop."""
    book = ConnectionBook(ConnectionLimits(), TickingClock())
    opened = [await stack.enter_async_context(connection_to(app, book=book)) for _ in range(num_connections)]
    return [protocol for protocol, _ in opened]


def test_a_health_check_is_parsed_before_requests_that_came_earlier() -> None:
    async def run() -> None:
        paths: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            paths.append(scope["path"])

        async with AsyncExitStack() as stack:
            *before, prober = await opened_beside(stack, app, 30)
            for protocol in before:
                protocol.data_received(request_bytes("/v1/completions", {"prompt": "hi"}))
            prober.data_received(HEALTH)
            for _ in range(5):
                await asyncio.sleep(0)
        assert "/health" in paths
        assert len(paths) < 10, "the others wait for their turn"

    asyncio.run(run())


def test_a_request_that_begins_has_what_came_of_its_body() -> None:
    async def run() -> None:
        bodies: list[bytes] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            message = await receive()
            assert not message["more_body"]
            bodies.append(message["body"])

        async with AsyncExitStack() as stack:
            protocols = await opened_beside(stack, app, 5)
            for number, protocol in enumerate(protocols):
                protocol.data_received(request_bytes("/v1/completions", {"prompt": str(number)}))
            while len(bodies) < 5:
                num_begun = sum(protocol.cycle is not None for protocol in protocols)
                assert num_begun - len(bodies) <= 2, "none waits for its body behind the headers of others"
                await asyncio.sleep(0)
        assert [json.loads(body)["prompt"] for body in bodies] == ["0", "1", "2", "3", "4"]

    asyncio.run(run())


def test_requests_whose_clients_left_before_they_were_parsed_do_not_begin() -> None:
    async def run() -> None:
        app = Unanswered()
        async with AsyncExitStack() as stack:
            protocols = await opened_beside(stack, app, 20)
            for protocol in protocols:
                protocol.data_received(request_bytes("/v1/completions", {"prompt": "hi"}))
            for protocol in protocols:
                protocol.eof_received()
                protocol.transport.close()  # as the loop does then
            for _ in range(100):
                await asyncio.sleep(0)
            assert app.num_asked == 1, "only the one that was parsed as it came"
            assert not any(protocol._input for protocol in protocols)

    asyncio.run(run())


async def ask(connection: socket.socket, path: bytes) -> int:
    """Send a request and return the status of its answer."""
    connection.sendall(HEALTH.replace(b"/health", path))
    ((status, _),) = await asyncio.to_thread(read_responses, connection, 1)
    return status


def test_a_connection_that_asks_for_more_than_health_takes_an_ordinary_place() -> None:
    limits = ConnectionLimits(max_connections=1, max_health_connections=1)

    async def run() -> None:
        app = AnsweredLater()
        app.may_answer.set()
        book = ConnectionBook(limits, ManualClock())
        async with (
            connection_to(app, book=book) as (_, ordinary),
            connection_to(app, book=book) as (_, other),
        ):
            assert await ask(ordinary, b"/health") == 200  # from now on it may be closed
            for path in (b"/v1/models", b"/health", b"/v1/models"):
                assert await ask(other, path) == 200  # and kept alive as any other
            assert await asyncio.to_thread(ordinary.recv, 1) == b""

    asyncio.run(run())
