"""Connections that send half a request, or nothing, neither stay forever nor lock others out."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import queue
import socket
import sys
from collections.abc import Callable, Iterator
from logging.handlers import QueueHandler

import pytest
from server_fixtures import Served, live
from serving_fakes import says
from test_live_server import connect, read_response, request_bytes

from loraplex.core.clock import ManualClock
from loraplex.core.errors import UserError
from loraplex.server.connections import ConnectionBook, ConnectionLimits, Places, connections_within
from loraplex.server.errors import HeadersTooLargeError
from loraplex.server.http_checks import check_header_bytes, check_header_fields

ServedFactory = Callable[..., Served]


def error_of(connection: socket.socket) -> tuple[int, str]:
    """Return status and code of an answer that ends the connection, which must look like all other errors."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    error = json.loads(response.read())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"].startswith("req-")
    assert connection.recv(1) == b""
    return response.status, error["code"]


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_half_sent_headers_are_answered_and_closed(
    make_served: ServedFactory, caplog: pytest.LogCaptureFixture
) -> None:
    with live(make_served(), ConnectionLimits(header_timeout_s=0.2)) as url, connect(url) as half:
        half.sendall(b"GET /health HTTP/1.1\r\nHost: local")
        assert error_of(half) == (408, "header_timeout")
    assert any("headers did not arrive" in record.message for record in caplog.records)


def test_a_connection_that_says_nothing_is_closed_without_a_word(make_served: ServedFactory) -> None:
    with live(make_served(), ConnectionLimits(header_timeout_s=0.2)) as url, connect(url) as silent:
        assert silent.recv(1) == b""


def test_half_sent_headers_of_a_kept_connection_end_too(make_served: ServedFactory) -> None:
    with live(make_served(), ConnectionLimits(header_timeout_s=0.2)) as url, connect(url) as kept:
        kept.sendall(HEALTH)
        assert read_response(kept)[0] == 200
        kept.sendall(HEALTH[:20])
        assert read_response(kept)[0] == 408


def test_a_request_may_take_longer_than_its_headers(make_served: ServedFactory) -> None:
    served = make_served(says("Hello", pause_after=0))
    with live(served, ConnectionLimits(header_timeout_s=0.2)) as url, connect(url) as streaming:
        body = {"model": "base", "prompt": "hi", "stream": True}
        streaming.sendall(request_bytes("/v1/completions", body))
        assert streaming.recv(12) == b"HTTP/1.1 200"
        with connect(url) as silent:
            assert silent.recv(1) == b""  # so the header timeout has passed by now
        received = b""
        while b"\r\n\r\n" not in received:
            received += streaming.recv(4096)
        streaming.setblocking(False)
        with pytest.raises(BlockingIOError):  # open, and nothing more was sent
            streaming.recv(1)


def test_headers_are_bounded_in_size(make_served: ServedFactory) -> None:
    with live(make_served(), ConnectionLimits(max_header_bytes=1000)) as url, connect(url) as large:
        large.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 2000)
        assert error_of(large) == (431, "headers_too_large")
    for check, number in ((check_header_bytes, 2**20), (check_header_fields, 1000)):
        with pytest.raises(HeadersTooLargeError, match="; send fewer"):
            check(number, ConnectionLimits())


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_headers_behind_a_chunked_body_are_bounded_in_size(make_served: ServedFactory) -> None:
    with live(make_served(), ConnectionLimits(max_header_bytes=1000)) as url:
        with connect(url) as endless:
            endless.sendall(CHUNKED + b"0\r\n" + b"X: yyyyyyyyyyyyyyyy\r\n" * 100)
            assert error_of(endless) == (431, "headers_too_large")
        with connect(url) as long:
            long.sendall(CHUNKED + b"0\r\nX: %s\r\n\r\n" % (b"y" * 2000))
            assert error_of(long) == (431, "headers_too_large")
        with connect(url) as short:
            body = b'{"model": "base", "prompt": "hi"}'
            short.sendall(CHUNKED + b"%x\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(body), body))
            assert read_response(short)[0] == 200


FIELDS = {  # what comes before them, how many there are in it, and the answer if they are not too many
    "of a header": (HEALTH[:-2], 1, 200),
    "of an upgrade": (HEALTH[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n", 3, 200),
    "behind a chunked body": (CHUNKED + b"0\r\n", 2, 400),
}


@pytest.mark.parametrize(("head", "num_in_head", "status"), FIELDS.values(), ids=FIELDS.keys())
def test_header_fields_are_bounded_in_number(
    make_served: ServedFactory, head: bytes, num_in_head: int, status: int
) -> None:
    most = head + b"X:\r\n" * (10 - num_in_head)
    with live(make_served(), ConnectionLimits(max_header_fields=10)) as url, connect(url) as connection:
        for _ in range(2):
            connection.sendall(most + b"\r\n")
            assert read_response(connection)[0] == status
        connection.sendall(most + b"X:\r\n\r\n")
        assert error_of(connection) == (431, "headers_too_large")
        with connect(url) as endless:
            endless.sendall(head + b"X:\r\n" * 20)
            assert error_of(endless) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "request_text",
    [b"\x16\x03\x01", b"HELLO\r\n\r\n", HEALTH[:-2] + b"Transfer-Encoding: chunked\r\n\r\nx"],
    ids=["TLS", "words", "bad chunk"],
)
def test_what_is_no_http_is_answered_as_all_errors_are(
    make_served: ServedFactory, request_text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "loraplex.request")
    path = request_text.replace(b"GET /health ", b"POST /v1/completions ")  # whose answer waits for the body
    with live(make_served()) as url, connect(url) as connection:
        connection.sendall(path)
        assert error_of(connection) == (400, None)
    refusals = [record for record in caplog.records if getattr(record, "fields", {}).get("status") == 400]
    assert len(refusals) == 1
    assert refusals[0].fields["error"] == "InvalidRequestError"  # type: ignore[attr-defined]


def test_an_upgrade_to_a_websocket_is_answered_as_if_it_were_not_asked_for(
    make_served: ServedFactory, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with live(make_served(), ConnectionLimits(max_connections=1)) as url, connect(url) as connection:
        connection.sendall(HEALTH[:-2] + upgrade)
        assert read_response(connection) == (200, b'{"status":"ok"}')
        connection.sendall(HEALTH)
        assert read_response(connection)[0] == 200
        with connect(url) as other:  # the connection is idle, and is closed
            other.sendall(HEALTH)
            assert read_response(other)[0] == 200
    assert not any("websocket" in record.message.lower() for record in caplog.records)


def test_idle_connections_make_room_for_new_ones(
    make_served: ServedFactory, caplog: pytest.LogCaptureFixture
) -> None:
    with live(make_served(), ConnectionLimits(max_connections=3, grace_s=0)) as url:
        idle = [connect(url) for _ in range(3)]
        idle[0].sendall(HEALTH)  # served, and idle from now on: the youngest of the idle ones
        assert read_response(idle[0])[0] == 200
        with connect(url) as fresh:
            fresh.sendall(HEALTH)
            assert read_response(fresh)[0] == 200
        assert idle[1].recv(1) == b"", "the one that was idle for longest goes"
        idle[0].sendall(HEALTH)
        assert read_response(idle[0])[0] == 200
        for connection in idle:
            connection.close()
    assert any("connections are taken" in record.message for record in caplog.records)


def connected(num_places: int, grace_s: float, clock: ManualClock) -> tuple[Places, list[Leaver]]:
    """Return places that are all taken by new connections."""
    places, connections = Places(num_places, clock, grace_s=grace_s), [Leaver() for _ in range(num_places)]
    for connection in connections:
        places.add(connection)
    return places, connections


class Leaver:
    def give_way(self) -> None:
        raise AssertionError("only the book asks for it")


def test_a_connection_gives_way_when_it_was_answered_or_has_asked_nothing_for_some_time() -> None:
    clock = ManualClock()
    places, (first, second, third) = connected(3, 5.0, clock)
    assert places.are_taken
    assert places.remove_one_that_gives_way() is None, "all are new"
    for answered in (second, third):
        places.became_active(answered)
        places.became_idle(answered)
    places.began_request(third)  # which is not complete yet
    assert places.remove_one_that_gives_way() is second
    assert places.remove_one_that_gives_way() is None
    clock.advance(5.0)
    assert [places.remove_one_that_gives_way() for _ in range(3)] == [first, third, None]
    for connection in (first, second, third):
        places.closed(connection, was_active=False)
    assert not places.are_taken


def test_new_connections_are_refused_in_words_while_others_send_their_requests(
    make_served: ServedFactory,
) -> None:
    limits = ConnectionLimits(max_connections=1, max_health_connections=1)
    with live(make_served(), limits) as url, connect(url) as kept:
        kept.sendall(HEALTH)
        assert read_response(kept)[0] == 200
        with connect(url) as sending, connect(url) as probe:
            assert kept.recv(1) == b"", "it was answered"
            sending.sendall(HEALTH[:20])
            probe.sendall(HEALTH[:20])
            for _ in range(3):
                with connect(url) as refused:
                    assert error_of(refused) == (503, "overloaded")
            for connection in (sending, probe):
                connection.sendall(HEALTH[20:])
                assert read_response(connection)[0] == 200


def test_half_a_request_that_gives_way_is_refused_in_words(make_served: ServedFactory) -> None:
    limits = ConnectionLimits(max_connections=1, max_health_connections=0, grace_s=0)
    with live(make_served(), limits) as url, connect(url) as slow:
        slow.sendall(HEALTH + HEALTH[:20])
        assert read_response(slow)[0] == 200
        with connect(url) as other:
            other.sendall(HEALTH)
            assert read_response(other)[0] == 200
        assert error_of(slow) == (503, "overloaded")


def test_connections_in_use_are_kept_and_a_new_one_is_refused_in_words(
    make_served: ServedFactory, caplog: pytest.LogCaptureFixture
) -> None:
    served = make_served(says("Hello", pause_after=0))
    limits = ConnectionLimits(max_connections=1, max_health_connections=0)
    with live(served, limits) as url, connect(url) as streaming:
        body = {"model": "base", "prompt": "hi", "stream": True}
        streaming.sendall(request_bytes("/v1/completions", body))
        assert streaming.recv(12) == b"HTTP/1.1 200"
        with connect(url) as refused:
            assert error_of(refused) == (503, "overloaded")
    assert "connections: 1 refused, as all 1 are in use" in caplog.messages


def test_health_can_be_asked_for_when_all_connections_are_in_use(make_served: ServedFactory) -> None:
    served = make_served(says("Hello", pause_after=0))
    limits = ConnectionLimits(max_connections=1, max_health_connections=2, health_grace_s=0)
    with live(served, limits) as url, connect(url) as streaming:
        body = {"model": "base", "prompt": "hi", "stream": True}
        streaming.sendall(request_bytes("/v1/completions", body))
        assert streaming.recv(12) == b"HTTP/1.1 200"
        with connect(url) as first, connect(url) as second:  # without requests, so they make room
            for path in (b"/health", b"http://localhost/health/live", b"/health/ready?probe=1"):
                with connect(url) as probe:
                    probe.sendall(HEALTH.replace(b"/health", path))
                    assert read_response(probe)[0] == 200
                    assert probe.recv(1) == b""
            assert first.recv(1) == b""
            second.sendall(HEALTH.replace(b"/health", b"/v1/models"))
            assert error_of(second) == (503, "overloaded")


def test_a_connection_leaves_the_places_for_health_checks_when_there_is_an_ordinary_one() -> None:
    async def run() -> None:
        limits = ConnectionLimits(max_connections=1, max_health_connections=1)
        book = ConnectionBook(limits, ManualClock())
        first, second, third = Leaver(), Leaver(), Leaver()
        ordinary, for_health = book.opened(first), book.opened(second)
        assert ordinary is not None
        assert for_health is not None
        assert (ordinary.only_health, for_health.only_health) == (False, True)
        assert book.move_to_ordinary(second) is None, "the only ordinary place is taken"
        assert book.opened(third) is None, "so the other connection has kept its own"
        ordinary.closed(first, was_active=False)
        assert book.move_to_ordinary(second) is ordinary
        assert book.opened(third) is for_health
        ordinary.became_active(second)
        ordinary.closed(second, was_active=True)
        assert not ordinary.are_taken

    asyncio.run(run())


@pytest.fixture
def logged() -> Iterator[queue.SimpleQueue[logging.LogRecord]]:
    """Collect the log records about connections, as they arrive."""
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(records)
    logger = logging.getLogger("loraplex.server.connections")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such timeout")
def test_a_client_that_never_reads_loses_its_connection(
    make_served: ServedFactory, logged: queue.SimpleQueue[logging.LogRecord]
) -> None:
    with live(make_served(), ConnectionLimits(write_timeout_s=0.3)) as url, socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        page = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        stuck.sendall(page * 500)  # more than all buffers in between hold
        assert "1 closed, as nothing that was sent was taken" in logged.get(timeout=30).getMessage()


@pytest.mark.parametrize(("files", "wanted", "expected"), [(1024, 8192, 896), (65_536, 100, 100), (64, 5, 1)])
def test_connections_stay_within_open_files(files: int, wanted: int, expected: int) -> None:
    assert connections_within(files, wanted) == expected


def test_replicas_and_requests_that_are_sent_on_need_open_files_too() -> None:
    assert connections_within(1024, 8192, num_replicas=17) == 896 - 16 * 16
    assert connections_within(1024, 8192, is_front=True) == 448


def test_too_few_open_files_are_said_before_anything_starts() -> None:
    with pytest.raises(UserError, match=r"may open 32 files, and needs 64 to start; raise the limit"):
        connections_within(32, 8192)
    with pytest.raises(UserError, match=r"may open 256 files, and needs 1072 to start; .*ulimit -n 2144"):
        connections_within(256, 8192, num_replicas=64)


def num_logged(caplog: pytest.LogCaptureFixture) -> list[list[int]]:
    """Return the counts in each line of the log."""
    lines = [message.removeprefix("connections: ").split("; ") for message in caplog.messages]
    return [[int(part.split()[0]) for part in parts] for parts in lines]


def test_the_log_says_the_first_at_once_and_others_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        book = ConnectionBook(ConnectionLimits(), ManualClock(), log_interval_s=0.001)
        for _ in range(3):
            book.refused()
        book.stalled()
        assert num_logged(caplog) == [[1]]
        while len(caplog.messages) < 2:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert num_logged(caplog) == [[1], [2, 1]]


def test_the_log_says_what_is_left_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        book = ConnectionBook(ConnectionLimits(), ManualClock())
        for _ in range(3):
            book.refused()
        book.stalled()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert num_logged(caplog) == [[1], [2, 1]]
