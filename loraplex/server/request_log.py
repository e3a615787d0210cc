"""The request log: one line at the end of each HTTP request, and the headers that identify it.

The middleware creates a `RequestRecord` for every request and keeps it in the request's scope. The code that
handles the request fills it in; the middleware adds headers to the response and logs the record when the
request is over, however it ended. Prompts, outputs and keys are never recorded.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.core.clock import Clock
from loraplex.core.logs import fields, log_context
from loraplex.core.request import FinishReason
from loraplex.server.failure import Failure
from loraplex.server.generation_responses import Usage
from loraplex.server.metrics import RequestMeter
from loraplex.server.sent_to import sent_to

if TYPE_CHECKING:
    from loraplex.server.traces import RequestTrace, Traces

logger = logging.getLogger("loraplex.request")
_server_logger = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = b"x-request-id"
VERSION_HEADER: Final = b"x-loraplex-adapter-version"
SHORT_VERSION_CHARS: Final = 12

_STATE_KEY: Final = "loraplex.request"
_SEND_KEY: Final = "loraplex.send"
_SANE_ID: Final = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_MAX_QUOTED_CHARS: Final = 128
_GENERATION_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_REFUSALS: Final = frozenset({400, 401, 403, 408, 413, 415, 429})
"""Statuses that are logged at INFO on every route; other statuses of monitoring and listing routes are
noise."""
_CLIENT_GONE: Final = 499
_UNAVAILABLE: Final = 503
BATCH_KIND: Final = "batch"
"""The kind of key of a line of a batch, which has none."""


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """The facts about one HTTP request for its line in the log.

    `arrival_s`: time when its headers had been read, before any processing. `key_kind`: the kind of its key,
    if one was required. `model` and `version`: the name it asked for and the version behind it; `version` is
    None for the base model. `completion_id`: the `id` in the answer's body. `replicas`: the replicas it was
    sent to, one after the other. `failure`: the error that ended it. `tenant`: whose key it sent, where there
    are tenants. `late_headers`: headers for its response, whose values are known when it begins. `trace`: its
    span, if it is traced.
    """

    request_id: str
    method: str
    path: str
    client: str | None
    arrival_s: float
    key_kind: str | None = None
    tenant: str | None = None
    model: str | None = None
    version: str | None = None
    completion_id: str | None = None
    meter: RequestMeter | None = None
    usage: Callable[[], Usage] | None = None
    failure: Failure | None = None
    late_headers: Callable[[], list[tuple[bytes, bytes]]] = list
    replicas: list[int] = field(default_factory=list)
    trace: RequestTrace | None = None

    def ask(self, model: str) -> None:
        """Record the model name that a client sent, which need not exist."""
        self.model = shorten(model)

    def begin(self, completion_id: str, meter: RequestMeter, usage: Callable[[], Usage]) -> None:
        """Record where to find the figures of the generation at its end."""
        self.completion_id, self.meter, self.usage = completion_id, meter, usage

    def fail(self, error: BaseException) -> None:
        """Record the error that ends the request."""
        self.failure = Failure.of(error)


def new_request_id() -> str:
    return f"req-{uuid.uuid4().hex}"


def request_record(scope: Scope) -> RequestRecord:
    """Return the record that the middleware created for a request's scope."""
    record: RequestRecord = scope["state"][_STATE_KEY]
    return record


def part_sender(scope: Scope) -> Send:
    """Return the server's own `send`, for parts of a body other than the last: everything between it and the
    application handles only the first and last message, and would double the cost of each token."""
    send: Send = scope["state"][_SEND_KEY]
    return send


class RequestLogMiddleware:
    """Plain ASGI around everything else, so that streams pass through message by message."""

    def __init__(self, app: ASGIApp, *, clock: Clock, traces: Traces | None = None) -> None:
        self._app = app
        self._clock = clock
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _record_of(scope, self._clock.now_s())
        if self._traces is not None and record.path in _GENERATION_PATHS:
            record.trace = self._traces.begin(scope, record.arrival_s)
        state = scope.setdefault("state", {})
        state[_STATE_KEY], state[_SEND_KEY] = record, send
        # Not reset: anything logged after this call, such as a traceback, is about this request too.
        log_context.set({"request_id": record.request_id})
        sent_to.set(record.replicas)
        exchange = _Exchange(record, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            exchange.cancelled = True
            raise
        except Exception as error:
            record.fail(error)
            if not exchange.complete:
                raise  # uvicorn logs it and closes the connection, which tells the client
            # Raised again, it would also end a connection on which the client may send its next request.
            _server_logger.exception("%s %s: internal error", record.method, record.path)
        finally:
            _end(record, exchange, self._clock.now_s() - record.arrival_s, self._traces)


class _Exchange:
    """Watches the messages of one request, and adds headers to the first message of its response."""

    def __init__(self, record: RequestRecord, receive: Receive, send: Send) -> None:
        self._record = record
        self._receive = receive
        self._send = send
        self.status: int | None = None
        self.complete = False
        self.hung_up = False
        self.cancelled = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.complete:
            self.hung_up = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (REQUEST_ID_HEADER, self._record.request_id.encode())]
            if self._record.version is not None:
                headers.append((VERSION_HEADER, self._record.version.encode()))
            headers += self._record.late_headers()
            message = {**message, "headers": headers}
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    def final_status(self) -> int:
        """Return the status to log: the one sent, unless the client disconnected before the end."""
        if self.complete and self.status is not None:
            return self.status
        if self.hung_up:
            return _CLIENT_GONE
        return self.status or (_UNAVAILABLE if self.cancelled else 500)


def _record_of(scope: Scope, arrival_s: float) -> RequestRecord:
    given = next((value for name, value in scope["headers"] if name == REQUEST_ID_HEADER), b"")
    sane = _SANE_ID.fullmatch(given)
    client = scope.get("client")
    return RequestRecord(
        request_id=given.decode("ascii") if sane else new_request_id(),
        method=scope["method"],
        path=shorten(scope["path"]),
        client=client[0] if client else None,
        arrival_s=arrival_s,
    )


def _end(record: RequestRecord, exchange: _Exchange, seconds: float, traces: Traces | None) -> None:
    """Log the line of a request, and end its trace."""
    status = exchange.final_status()
    meter = record.meter
    failure = record.failure or (meter.failure if meter else None)
    is_cut_short = not exchange.complete and (exchange.hung_up or exchange.cancelled)
    if is_cut_short or (failure is not None and failure.finish_reason is FinishReason.CANCELLED):
        outcome = "cancelled"
    elif status >= 500 or (failure is not None and status < 400):
        outcome = "failed"
    else:
        outcome = "refused" if status >= 400 else "answered"
    if record.path in _GENERATION_PATHS:
        level = logging.WARNING if outcome == "failed" else logging.INFO
    else:
        level = logging.INFO if status in _REFUSALS else logging.DEBUG
    if not logger.isEnabledFor(level) and record.trace is None:
        return
    line = _line(record, status, failure, seconds)
    logger.log(level, outcome, extra=fields(**line))
    if traces is not None and record.trace is not None:
        traces.end(record.trace, line, meter, failed=outcome == "failed")


def _line(record: RequestRecord, status: int, failure: Failure | None, seconds: float) -> dict[str, Any]:
    return {
        "status": status,
        "model": record.model,
        "version": short_version(record.version),
        "replica": ",".join(map(str, dict.fromkeys(record.replicas))) or None,
        **_figures(record),
        "total_ms": _milliseconds(seconds),
        "error": None if failure is None else failure.kind,
        "method": record.method,
        "route": record.path,
        "request_id": record.request_id,
        "id": record.completion_id,
        "client": record.client,
        "key": record.key_kind,
        "tenant": record.tenant,
    }


def _figures(record: RequestRecord) -> dict[str, Any]:
    """Return tokens, times and finish reasons of a generation; empty if none began."""
    if record.meter is None or record.usage is None:
        return {}
    meter, usage = record.meter, record.usage()
    details = usage.prompt_tokens_details
    reasons = sorted(meter.finish_reasons.items())
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": details.cached_tokens if details else 0,
        "completion_tokens": usage.completion_tokens,
        "reproducible": None if usage.reproducible is UNSET else usage.reproducible,
        "choices": meter.num_choices,
        "finish": ",".join(reason if count == 1 else f"{reason}:{count}" for reason, count in reasons),
        "ttft_ms": None if meter.ttft_s is None else _milliseconds(meter.ttft_s),
    }


def short_version(version: str | None) -> str | None:
    """Return enough of an adapter version to find it by."""
    return None if version is None else version[:SHORT_VERSION_CHARS]


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def shorten(text: str) -> str:
    """Shorten a client's text for a line of the log."""
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."
