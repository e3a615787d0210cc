"""HTTP connections within bounds: time for headers, their size, and how many connections there may be.

    connection_made ──▶ IDLE ──headers complete──▶ ACTIVE ──response complete──▶ IDLE (kept alive)
                         │ no complete headers within header_timeout_s, or beyond max_header_bytes
                         ▼
                       closed

At the limit, the connection that has been idle for longest is closed to make room for a new one, so that
connections which ask for nothing lock nobody out. If all are being answered, the new one is refused with 503.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loraplex.core.clock import Clock
from loraplex.core.errors import InvalidRequestError
from loraplex.core.logs import fields
from loraplex.server.errors import BusyError, HeadersTooLargeError, HeaderTimeoutError, describe
from loraplex.server.request_log import REQUEST_ID_HEADER, new_request_id
from loraplex.server.request_log import logger as request_logger

logger = logging.getLogger(__name__)

_DESCRIPTORS_FOR_OTHERS: Final = 128
"""Descriptors that are not connections: files, sockets to the engine, libraries."""
_MAX_DESCRIPTORS: Final = 65_536
_LOG_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    max_connections: int = 8192
    header_timeout_s: float = 60.0
    max_header_bytes: int = 64 * 2**10


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as the system allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def connections_within(descriptor_limit: int, wanted: int) -> int:
    """Connections there may be where so many files may be open."""
    return max(1, min(wanted, descriptor_limit - _DESCRIPTORS_FOR_OTHERS))


class ConnectionBook:
    """The connections of one server, and which of them ask for nothing."""

    def __init__(self, limits: ConnectionLimits, clock: Clock) -> None:
        self.limits = limits
        self._clock = clock
        self._idle: dict[BoundedHttpProtocol, None] = {}  # in the order in which they became idle
        self._num_active = 0
        self._outcomes: Counter[str] = Counter()  # since the last line of the log
        self._logged_s = float("-inf")

    def opened(self, connection: BoundedHttpProtocol) -> bool:
        """Count a new connection; False if there is no room for it."""
        if len(self._idle) + self._num_active >= self.limits.max_connections:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                self._log(f"refused, as all {self.limits.max_connections} are in use")
                return False
            self._log(f"closed while idle, as all {self.limits.max_connections} connections are taken")
            del self._idle[oldest]
            oldest.give_way()
        self._idle[connection] = None
        return True

    def became_active(self, connection: BoundedHttpProtocol) -> None:
        if connection in self._idle:
            del self._idle[connection]
            self._num_active += 1

    def became_idle(self, connection: BoundedHttpProtocol) -> None:
        self._num_active -= 1
        self._idle[connection] = None

    def closed(self, connection: BoundedHttpProtocol, *, was_active: bool) -> None:
        if was_active:
            self._num_active -= 1
        else:
            self._idle.pop(connection, None)

    def timed_out(self) -> None:
        """A connection was closed because its headers did not come."""
        self._log(f"closed, as headers did not arrive within {self.limits.header_timeout_s:g} s")

    def _log(self, outcome: str) -> None:
        """Write a line now and then, however many connections are closed or refused."""
        self._outcomes[outcome] += 1
        if self._clock.now_s() - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = self._clock.now_s()
            counts = "; ".join(f"{count} {outcome}" for outcome, count in self._outcomes.items())
            logger.warning("connections: %s", counts)
            self._outcomes.clear()


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's connection with the bounds above."""

    def __init__(self, *args: Any, book: ConnectionBook, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._book = book
        self._is_active = False  # a request is being answered
        self._reads_message = False  # its body is not complete, or of one that was answered before that
        self._num_header_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_counted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_counted = self._book.opened(self)
        if not self._is_counted:
            self._refuse(BusyError("the server has as many connections as it takes; try again"))
            return
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._reads_message:  # headers, also those of a request behind the one that is answered
            self._num_header_bytes += len(data)
        if self._awaits_headers:
            self._start_timer()
        super().data_received(data)
        if self._num_header_bytes > self._book.limits.max_header_bytes:
            limit = self._book.limits.max_header_bytes
            self._refuse(HeadersTooLargeError(f"the request's headers are larger than {limit:,} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_message:  # behind a body in chunks: nobody asks for it, but it counts
            self._num_header_bytes += len(name) + len(value)
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._reads_message = True
        self._num_header_bytes = 0
        self._stop_timer()
        if not self._is_active:
            self._is_active = True
            self._book.became_active(self)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_message = False
        self._num_header_bytes = 0
        self._stop_timer()

    def on_response_complete(self) -> None:
        has_next = bool(self.pipeline)
        super().on_response_complete()
        if self._is_active and not has_next and not self.transport.is_closing():
            self._is_active = False
            self._book.became_idle(self)
            if self._reads_message:  # refused before its body came: the rest is read, but not for ever
                self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in the shape of all other errors."""
        self._refuse(InvalidRequestError(msg))

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing of a missing library for WebSockets. Such a request is answered as if it had no body,
        since the parser stops at its headers."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._is_counted:
            self._book.closed(self, was_active=self._is_active)
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close an idle connection, as another one needs its place."""
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether what is written now would be read as the answer to another request, or as a part of one."""
        return self._is_active and (
            not self._reads_message or bool(self.pipeline) or self.cycle.response_started
        )

    @property
    def _awaits_headers(self) -> bool:
        return not self._is_active and not self._reads_message

    def _start_timer(self) -> None:
        """Time runs from the first moment on, not from the last byte: a drip of headers ends as well."""
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
        if self._num_header_bytes == 0:  # nothing was asked, so nothing is answered
            self.transport.close()
            return
        timeout_s = self._book.limits.header_timeout_s
        self._refuse(HeaderTimeoutError(f"the request's headers did not arrive within {timeout_s:g} seconds"))

    def _refuse(self, error: Exception) -> None:
        """Answer without the application, and close; without a word in the middle of another answer."""
        if self._is_answering or self.transport.is_closing():
            self.transport.close()
            return
        http_error, request_id = describe(error), new_request_id()
        body = http_error.body()
        head = [
            f"HTTP/1.1 {http_error.status} {http_error.reason}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            f"{REQUEST_ID_HEADER.decode()}: {request_id}",
            *(f"{name}: {value}" for name, value in http_error.headers.items() if name != "connection"),
        ]
        self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        self.transport.close()
        # Only when debugging: whoever opens connections can cause any number of these.
        request_logger.debug(
            "refused",
            extra=fields(
                status=http_error.status,
                error=type(error).__name__,
                request_id=request_id,
                client=self.client[0] if self.client else None,
            ),
        )
