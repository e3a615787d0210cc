"""HTTP connections with limits: time for headers, their size and number, and how much is parsed ahead.

    connection_made ──▶ IDLE ──headers complete──▶ ACTIVE ──response complete──▶ IDLE (kept alive)
                         │ no complete headers within header_timeout_s, or beyond max_header_*
                         ▼
                       closed

Input is parsed in slices, alternating with other connections, and only a few requests ahead of the one being
answered. A little more is read to notice a client that disconnects; beyond that, TCP holds it back.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraplex.core.errors import InvalidRequestError, UserError
from loraplex.core.logs import fields
from loraplex.server.connections import ConnectionBook, Places, set_write_timeout
from loraplex.server.errors import BusyError, HeaderTimeoutError, describe
from loraplex.server.http_checks import (
    asks_for_health,
    check_chunk_bytes,
    check_header_bytes,
    check_header_fields,
    check_transfer_coding,
    check_version,
    may_ask_for_health,
)
from loraplex.server.http_input import HttpInput, InputFlow
from loraplex.server.http_output import close_unless_continued, refusal_bytes, send_until_close
from loraplex.server.request_log import logger as request_logger
from loraplex.server.request_log import new_request_id

_MAX_PIPELINED: Final = 4
"""Number of requests of one connection that may wait behind the one being answered."""
_MAX_HELD_BYTES: Final = 64 * 2**10
"""Unparsed bytes of one connection at which reading pauses."""
_NO_PLACE: Final = "the server has as many connections as it takes; try again"


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's connection with the limits above."""

    def __init__(self, *args: Any, book: ConnectionBook, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._book = book
        self._is_active = False  # a request is being answered
        self._answered: RequestResponseCycle | None = None  # that request, or the last one answered
        self._reads_message = False  # a body is incomplete, perhaps of a request answered already
        self._num_header_bytes = 0
        self._num_header_fields = 0  # of the request being read
        self._num_chunk_overhead_bytes = 0  # of a chunked body, without the chunks' data
        self._num_body_bytes_left = 0  # of a body of known length
        self._input = HttpInput()
        self._failure: Exception | None = None  # of input behind requests that are being answered
        self._needs_parser = False  # because this one accepts no more requests
        self._waits_to_parse = False  # for this connection's turn
        self._timer: asyncio.TimerHandle | None = None
        self._places: Places | None = None  # the kind of place it has

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = InputFlow(transport, self._parse_later)
        set_write_timeout(transport.get_extra_info("socket"), self._book.limits.write_timeout_s)
        self._places = self._book.opened(self)
        if self._places is None:
            self._refuse(BusyError(_NO_PLACE))
            return
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._failure is not None:
            return
        if not self._is_active and self._places is not None:
            self._places.began_request(self)
        is_first = not self._is_active and self._num_header_bytes == 0 and not self._input
        self._input.add(data)
        if not self._waits_to_parse:
            self._waits_to_parse = True
            self._book.parsing.do(self._parse, urgent=is_first and may_ask_for_health(data))

    def eof_received(self) -> None:
        """Handle the end of the client's input. The connection is closed: a half-closed one looks like a
        client that left. Requests that wait to be parsed are dropped: when a burst of clients leaves,
        starting all of them would take long.
        """
        if self._may_parse and self._reads_message:
            self._parse_slice()  # the end of a body
        if not self._reads_message:
            self._input.clear()
        if self._reads_message or self._num_header_bytes:
            self._fail(InvalidRequestError("the request ended before all of it was sent"))

    def on_message_begin(self) -> None:
        self._num_header_fields = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_fields += 1
        check_header_fields(self._num_header_fields, self._book.limits)
        if self._reads_message:  # trailers of a chunked body: unused, but counted
            self._num_header_bytes += len(name) + len(value)
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._ignores_upgrade:
            return
        assert self._places is not None
        check_header_bytes(self._num_header_bytes, self._book.limits)
        check_version(self.parser.get_http_version())
        if self._places.only_health and not asks_for_health(self.url):
            self._places = self._ordinary_place()
        check_transfer_coding(self.headers)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            send_until_close(self.cycle)
        if self.expect_100_continue:
            close_unless_continued(self.cycle)
        if self._places.only_health:
            self.cycle.keep_alive = False
        self._reads_message = True
        self._num_header_bytes = self._num_chunk_overhead_bytes = 0
        self._num_body_bytes_left = int(dict(self.headers).get(b"content-length", 0))
        self._stop_timer()
        if not self._is_active:
            self._is_active = True
            self._answered = self.cycle
            self._places.became_active(self)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes_left -= len(body)
        self._num_chunk_overhead_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._ignores_upgrade:
            return
        check_header_bytes(self._num_header_bytes, self._book.limits)
        super().on_message_complete()
        # A `Connection: close` after a chunked body, which would make the parser silently stop.
        self._needs_parser = self.cycle.keep_alive and not self.parser.should_keep_alive()
        self._reads_message = False
        self._num_header_bytes = self._num_body_bytes_left = 0
        self._stop_timer()
        if not self._is_active:  # the request was answered before its body arrived
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        has_next = bool(self.pipeline)
        if has_next:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._failure is not None and not has_next:
            self._refuse(self._failure)
            return
        if self._is_active and self._places is not None and not has_next:
            self._is_active = False
            self._places.became_idle(self)
            if self._input or self._num_header_bytes:
                self._places.began_request(self)
            if self._reads_message or self._num_header_bytes:
                # The rest of a body that was refused early, or of the next request's headers: both are read,
                # but only until the timeout.
                self._unset_keepalive_if_required()
                self._start_timer()
        if self._input:
            self._parse_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._input.clear()
        if self._answered is not None:  # uvicorn notifies only the last request
            self._answered.disconnected = True
            self._answered.message_event.set()
        if isinstance(exc, TimeoutError):
            self._book.stalled()
        if self._places is not None:
            self._places.closed(self, was_active=self._is_active)
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close this connection, which is not active, because another one needs its place."""
        if self._awaits_headers and (self._num_header_bytes or self._input):
            self._refuse(BusyError(_NO_PLACE))
        else:
            self.transport.close()

    @property
    def _may_parse(self) -> bool:
        return (
            bool(self._input)
            and not self.flow.read_paused
            and len(self.pipeline) < _MAX_PIPELINED
            and not self.transport.is_closing()
        )

    def _parse_later(self) -> None:
        if not self._waits_to_parse:
            self._waits_to_parse = True
            self._book.parsing.do_later(self._parse)

    def _parse(self) -> bool:
        """Parse a slice if that is possible now; return whether there is more."""
        if self._may_parse:
            self._parse_slice()
        if self._num_body_bytes_left > 0 and self._may_parse:
            # A body is parsed together with its headers: it is one callback, however long it is. A request
            # admitted this way has its body; otherwise all requests waiting for theirs would continue in the
            # same iteration.
            self._parse_slice()
        if self._holds_back_body:
            self._fail(BusyError("a large body came behind a request that is not answered yet; send it then"))
        self._waits_to_parse = self._may_parse
        if self.transport.is_closing():
            return False
        if len(self._input) < _MAX_HELD_BYTES:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()
        return self._waits_to_parse

    @property
    def _holds_back_body(self) -> bool:
        """Return whether so much of a body waits behind other requests that its client could disconnect
        unnoticed."""
        is_behind = self._reads_message and bool(self.pipeline)
        return is_behind and len(self._input) >= _MAX_HELD_BYTES and not self._may_parse

    def _parse_slice(self) -> None:
        if self._num_body_bytes_left > 0:
            data = self._input.take_body(self._num_body_bytes_left)
        else:
            data = self._input.take_lines()
        if not self._reads_message and self._num_header_bytes == 0:
            data = data.lstrip(b"\r\n")  # blank lines between requests are ignored
            if not data:
                return
        self._unset_keepalive_if_required()
        if self._awaits_headers:
            self._start_timer()
        if not self._reads_message:  # headers, possibly of a pipelined request
            self._num_header_bytes += len(data)
        else:
            self._num_chunk_overhead_bytes += len(data)
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            if self._stops_at_upgrade(data) and self._ignores_upgrade:
                self._feed_head_without_upgrade()
            if self._needs_parser:
                self._renew_parser()
            check_header_bytes(self._num_header_bytes, self._book.limits)
            check_chunk_bytes(self._num_chunk_overhead_bytes, self._book.limits)
        except httptools.HttpParserError as error:
            cause = error.__context__  # the error that our callback raised
            if not isinstance(cause, UserError):
                cause = InvalidRequestError(
                    "this is not a valid HTTP/1.1 request; is it meant for another port?"
                )
            self._fail(cause)
        except UserError as error:
            self._fail(error)

    def _stops_at_upgrade(self, data: bytes) -> bool:
        """Parse bytes; return whether the parser expects another protocol after them."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return True
        return False

    def _ordinary_place(self) -> Places:
        """Move out of the places for health checks. Raises BusyError if there is no other place, or if the
        connection is answering a health check, which is its last response."""
        places = None if self._is_active else self._book.move_to_ordinary(self)
        if places is None:
            raise BusyError(_NO_PLACE)
        return places

    @property
    def _ignores_upgrade(self) -> bool:
        """Return whether the parser skips a request's body for a protocol upgrade, which we ignore."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _feed_head_without_upgrade(self) -> None:
        """Let a new parser begin with the same request and continue with its body. RFC 9110 lets a server
        ignore the protocol that a client offers to upgrade to (h2c of `curl --http2` and Java's clients,
        WebSockets).
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self._renew_parser()
        self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")

    def _renew_parser(self) -> None:
        self._needs_parser = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it

    @property
    def _awaits_headers(self) -> bool:
        return not self._is_active and not self._reads_message

    def _start_timer(self) -> None:
        """Start the timer for headers unless it runs: further bytes do not restart it, so slow clients time
        out too."""
        if self._timer is None:
            self._timer = self.loop.call_later(self._book.limits.header_timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if self.transport.is_closing():
            return
        self._book.timed_out()
        if self._num_header_bytes == 0:  # no request was begun, so there is no response
            self.transport.close()
            return
        timeout_s = self._book.limits.header_timeout_s
        self._refuse(HeaderTimeoutError(f"the request's headers did not arrive within {timeout_s:g} seconds"))

    def _fail(self, error: Exception) -> None:
        """Refuse the request being read once all requests before it were answered. Later input is dropped."""
        self._failure = error
        self._input.clear()
        self.flow.resume_reading()  # to notice when the client disconnects
        if self._reads_message and self.pipeline:
            self.pipeline.popleft()  # it has not been started
            self._reads_message = False
        if self._reads_message or not self._is_active:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """Respond without the application, and close; only close if the request already has a response."""
        if self.transport.is_closing() or (self._reads_message and self.cycle.response_started):
            self.transport.close()
            return
        http_error, request_id = describe(error), new_request_id()
        self.transport.write(refusal_bytes(http_error, request_id))
        self.transport.close()
        # At level debug only: anyone who opens connections can cause any number of these.
        request_logger.debug(
            "refused",
            extra=fields(
                status=http_error.status,
                error=type(error).__name__,
                request_id=request_id,
                client=self.client[0] if self.client else None,
            ),
        )
