"""One connection's input: parsed in portions, bounded, and answered in order."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket

import pytest
from http_connections import AnsweredLater, Unanswered, connection_to, read_responses
from server_fixtures import live
from test_connections import CHUNKED, HEALTH, ServedFactory, error_of
from test_live_server import connect, request_bytes

from loraplex.server.connections import ConnectionLimits
from loraplex.server.http_input import SLICE_BYTES, HttpInput


def test_a_burst_of_requests_is_parsed_as_it_is_answered() -> None:
    async def run() -> None:
        app = Unanswered()
        async with connection_to(app) as (protocol, _):
            protocol.data_received(HEALTH * 3000)
            await asyncio.wait_for(app.asked.wait(), 30)
            for _ in range(100):  # iterations of the loop, in which it could continue
                await asyncio.sleep(0)
            assert app.num_asked == 1
            assert 1 <= len(protocol.pipeline) <= 4
            assert not protocol.transport.is_reading()

    asyncio.run(run())


@pytest.mark.parametrize("portion", [7, 1 << 20])
def test_requests_that_a_client_sends_at_once_are_answered_in_order(
    make_served: ServedFactory, portion: int
) -> None:
    body = b'{"prompt": "%s",\r\n\r\n"add_special_tokens": false}' % (b"x" * 5000)
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    requests = (HEALTH + request_bytes("/tokenize", {"prompt": "Hello"}) + chunked + HEALTH) * 5
    with live(make_served()) as url, connect(url) as connection:
        for start in range(0, len(requests), portion):
            connection.sendall(requests[start : start + portion])
        responses = read_responses(connection, 4 * 5)
    assert responses[:4] * 5 == responses
    assert responses[0] == responses[3] == (200, b'{"status":"ok"}')
    assert [len(json.loads(body)["tokens"]) > 100 for _, body in responses[1:3]] == [False, True]


def test_a_slice_ends_no_more_than_one_request() -> None:
    received = HttpInput()
    for part in (HEALTH[:-1], HEALTH[-1:] + HEALTH, HEALTH[:-3], HEALTH[-3:]):
        received.add(part)
    assert [received.take_lines() for _ in range(3)] == [HEALTH, HEALTH, HEALTH]
    assert not received


def test_a_blank_line_is_found_across_slices() -> None:
    received, taken = HttpInput(), []
    for byte in HEALTH + b"x" * SLICE_BYTES:
        received.add(bytes([byte]))
        if byte != ord("x"):
            taken.append(received.take_lines())
    assert b"".join(taken) == HEALTH
    received.add(b"y")
    assert received.take_lines() == b"x" * SLICE_BYTES
    assert received.take_body(100) == b"y"


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
PROMPT = b'{"prompt": "Hello"}'
BODIES = {
    "content-length": b"Content-Length: %d\r\n\r\n%s" % (len(PROMPT), PROMPT),
    "chunked": b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(PROMPT), PROMPT),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("portion", [7, 1 << 20])
def test_a_request_that_would_like_to_upgrade_keeps_its_body(
    make_served: ServedFactory, body: bytes, portion: int
) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
    requests = (head + body) + (head + H2C + body) * 2 + HEALTH
    with live(make_served()) as url, connect(url) as connection:
        for start in range(0, len(requests), portion):
            connection.sendall(requests[start : start + portion])
        plain, first, second, health = read_responses(connection, 4)
    assert plain[0] == 200
    assert plain == first == second
    assert health[0] == 200


REFUSED_UPGRADES = {
    "no room": (b"", 503),
    "coding": (b"Transfer-Encoding: gzip\r\n", 501),
    "large": (b"X: %s\r\n" % (b"x" * 2000), 431),
}


@pytest.mark.parametrize(("header", "status"), REFUSED_UPGRADES.values(), ids=REFUSED_UPGRADES.keys())
def test_a_request_that_would_like_to_upgrade_is_refused_as_others_are(
    make_served: ServedFactory, header: bytes, status: int
) -> None:
    limits = ConnectionLimits(max_connections=int(status != 503), max_header_bytes=1000)
    with live(make_served(), limits) as url, connect(url) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n" + H2C + header + b"\r\n")
        assert error_of(connection)[0] == status


@pytest.mark.parametrize("portion", [7, 1 << 20])
def test_close_behind_a_body_in_chunks_loses_no_request(make_served: ServedFactory, portion: int) -> None:
    chunked = BODIES["chunked"][:-2] + b"Connection: close\r\n\r\n"
    requests = (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + chunked) * 2 + HEALTH
    with live(make_served()) as url, connect(url) as connection:
        for start in range(0, len(requests), portion):
            connection.sendall(requests[start : start + portion])
        assert [status for status, _ in read_responses(connection, 3)] == [200, 200, 200]


def test_connect_is_refused(make_served: ServedFactory) -> None:
    with live(make_served()) as url, connect(url) as connection:
        connection.sendall(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n")
        assert read_responses(connection, 1)[0][0] == 400


BROKEN = {
    "no HTTP": (b"\x16\x03\x01", 400),
    "broken body": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno chunk", 400),
    "endless headers": (b"GET / HTTP/1.1\r\nX: " + b"x" * 2000, 431),
}


@pytest.mark.parametrize(("broken", "status"), BROKEN.values(), ids=BROKEN.keys())
def test_requests_before_one_that_is_broken_are_answered(
    broken: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        app = AnsweredLater()
        async with connection_to(app, ConnectionLimits(max_header_bytes=1000)) as (protocol, client):
            protocol.data_received(HEALTH * 2 + broken)
            for _ in range(100):  # iterations of the loop
                protocol.data_received(b"dropped")
                await asyncio.sleep(0)
            app.may_answer.set()
            responses = await asyncio.to_thread(read_responses, client, 3)
            assert [status for status, _ in responses] == [200, 200, status]
            assert client.recv(1) == b""

    asyncio.run(run())
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)


def test_large_headers_that_come_at_once_are_refused(make_served: ServedFactory) -> None:
    lines = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 100) for number in range(95))
    with live(make_served(), ConnectionLimits(max_header_bytes=10_000)) as url:
        with connect(url) as connection:
            connection.sendall(HEALTH[:-2] + lines + b"\r\n")
            assert error_of(connection) == (431, "headers_too_large")
        with connect(url) as connection:  # each of them is short enough
            connection.sendall((HEALTH[:-2] + lines[:6000].rpartition(b"X")[0] + b"\r\n") * 3)
            assert [status for status, _ in read_responses(connection, 3)] == [200, 200, 200]


@pytest.mark.parametrize("coding", [b"gzip", b"gzip, chunked", b"identity"])
def test_transfer_codings_other_than_chunked_are_not_implemented(
    make_served: ServedFactory, coding: bytes
) -> None:
    with live(make_served()) as url, connect(url) as connection:
        connection.sendall(HEALTH[:-2] + b"Transfer-Encoding: %s\r\n\r\n" % coding)
        assert error_of(connection) == (501, "unsupported_transfer_encoding")


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/0.9"])
def test_other_versions_of_http_are_refused(make_served: ServedFactory, version: bytes) -> None:
    with live(make_served()) as url, connect(url) as connection:
        connection.sendall(HEALTH.replace(b"HTTP/1.1", version))
        assert error_of(connection) == (505, "unsupported_http_version")


@pytest.mark.parametrize("sent", [HEALTH[:-2], request_bytes("/tokenize", {"prompt": "Hello"})[:-1]])
def test_a_request_that_ends_too_early_is_answered(make_served: ServedFactory, sent: bytes) -> None:
    with live(make_served()) as url, connect(url) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert error_of(connection) == (400, None)


def test_a_stream_to_a_client_of_http_1_0_is_not_in_chunks(make_served: ServedFactory) -> None:
    completion = request_bytes("/v1/completions", {"model": "base", "prompt": "hi", "stream": True})
    with live(make_served()) as url:
        with connect(url) as connection:
            connection.sendall(completion.replace(b"HTTP/1.1", b"HTTP/1.0"))
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.headers["transfer-encoding"] is None
            assert response.headers["connection"] == "close"
            body = response.read()
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        with connect(url) as connection:
            connection.sendall(HEALTH.replace(b"HTTP/1.1", b"HTTP/1.0"))
            assert read_responses(connection, 1) == [(200, b'{"status":"ok"}')]


LARGE = b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 900_000
BEHIND = {
    "another": HEALTH,
    "many": HEALTH * 50,
    "large body": LARGE,
    "half of one": HEALTH[:-1],
}


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND.keys())
def test_a_request_with_something_behind_it_learns_that_its_client_has_left(behind: bytes) -> None:
    async def run() -> None:
        app = Unanswered()
        async with connection_to(app) as (_, client):
            await asyncio.to_thread(client.sendall, HEALTH + behind)
            await asyncio.wait_for(app.asked.wait(), 30)
            client.close()
            await asyncio.wait_for(app.was_left.wait(), 30)
            assert app.num_asked == 1

    asyncio.run(run())


def test_a_large_body_behind_a_request_that_is_not_answered_is_refused() -> None:
    async def run() -> None:
        app = AnsweredLater()
        async with connection_to(app) as (_, client):
            await asyncio.to_thread(client.sendall, HEALTH + LARGE)
            app.may_answer.set()
            assert [status for status, _ in await asyncio.to_thread(read_responses, client, 2)] == [200, 503]

    asyncio.run(run())


AROUND_CHUNKS = {
    "small chunks": b"1\r\n \r\n" * 1000,
    "an extension": b"1;" + b"x" * 5000,
    "extensions": b"".join(b"1;%s\r\n \r\n" % (b"x" * 100) for _ in range(50)),
    "a trailer": b"0\r\nX: " + b"x" * 5000,
}


@pytest.mark.parametrize("chunks", AROUND_CHUNKS.values(), ids=AROUND_CHUNKS.keys())
def test_what_is_around_chunks_is_bounded(make_served: ServedFactory, chunks: bytes) -> None:
    with (
        live(make_served(), ConnectionLimits(max_chunk_overhead_bytes=3000)) as url,
        connect(url) as connection,
    ):
        connection.sendall(CHUNKED + chunks)
        assert error_of(connection) == (413, "body_too_large")


@pytest.mark.parametrize("num_before", [1, 2, 9])
def test_half_sent_headers_behind_other_requests_end_too(make_served: ServedFactory, num_before: int) -> None:
    with live(make_served(), ConnectionLimits(header_timeout_s=0.2)) as url, connect(url) as connection:
        connection.sendall(HEALTH * num_before + HEALTH[:20])
        *answered, last = read_responses(connection, num_before + 1)
        assert [status for status, _ in answered] == [200] * num_before
        assert last[0] == 408


def test_a_connection_ends_after_a_body_that_came_behind_its_answer() -> None:
    async def run() -> None:
        app = AnsweredLater()
        app.may_answer.set()
        async with connection_to(app, keep_alive_s=0) as (_, client):
            client.settimeout(30)
            client.sendall(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n")
            assert await asyncio.to_thread(read_responses, client, 1) == [(200, b"here you are")]
            client.sendall(b"x" * 10)
            assert await asyncio.to_thread(client.recv, 1) == b""

    asyncio.run(run())


def test_a_blank_line_on_a_kept_connection_asks_for_nothing() -> None:
    async def run() -> None:
        app = AnsweredLater()
        app.may_answer.set()
        limits = ConnectionLimits(header_timeout_s=0.1)
        async with connection_to(app, limits, keep_alive_s=1) as (_, client):
            client.settimeout(30)
            client.sendall(HEALTH + b"\r\n" + HEALTH + b"\r\n")
            assert [status for status, _ in await asyncio.to_thread(read_responses, client, 2)] == [200, 200]
            assert await asyncio.to_thread(client.recv, 1) == b""

    asyncio.run(run())


def test_an_answer_without_the_body_that_a_client_holds_back_is_the_last(make_served: ServedFactory) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with live(make_served()) as url:
        with connect(url) as refused:
            refused.sendall(head % (b"/nope", len(PROMPT)))
            response = http.client.HTTPResponse(refused)
            response.begin()
            assert (response.status, response.headers["connection"]) == (404, "close")
        with connect(url) as continued:
            continued.sendall(head % (b"/tokenize", len(PROMPT)))
            assert continued.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            continued.sendall(PROMPT + HEALTH)
            assert [status for status, _ in read_responses(continued, 2)] == [200, 200]
