"""Convert every error to OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from loraplex.core.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterFetchError,
    AdapterFormatError,
    AdapterMismatchError,
    CapacityError,
    ContextLengthError,
    DiskFullError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    LoraplexError,
    PathNotAllowedError,
    StorageError,
    UnknownModelError,
    UserError,
)
from loraplex.server.request_log import request_record, shorten
from loraplex.server.responses import ErrorBody, ErrorDetail

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

INVALID_REQUEST: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"
_RETRY_AFTER_S: Final = "5"
_PATH: Final = re.compile(r"""(?<![\w/:])[~.]{0,2}(?:/[^\s/'"()\[\],;:]+){2,}/?""")


class BodyTooLargeError(UserError):
    """The request body is over the limit."""


class BodyTimeoutError(UserError):
    """The request body did not arrive in time."""


class HeaderTimeoutError(UserError):
    """The request's headers did not arrive in time."""


class HeadersTooLargeError(UserError):
    """The request's headers are over the limit."""


class HttpVersionError(UserError):
    """The request has an HTTP version that the server does not support."""


class TransferCodingError(UserError):
    """The request body has a transfer coding that the server does not decode."""


class ContentEncodingError(UserError):
    """The request body is compressed."""


class QueueFullError(UserError):
    """Too many requests, or too many of their tokens (`kind`), are waiting."""

    def __init__(self, message: str, *, kind: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


class QuotaError(QueueFullError):
    """The sender's tenant has reached one of its limits."""


class BusyError(UserError):
    """The server is busy: it has too many request bodies or connections, or could not stage a version in
    time."""


class UnauthorizedError(UserError):
    """The API key is missing or wrong."""


class InvalidHostError(UserError):
    """The Host header is missing, duplicated or malformed."""


class ForbiddenError(UserError):
    """The server does not allow this client to do this."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class NotFoundError(UserError):
    """There is no object with this id, as far as this client may know."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class ConflictError(UserError):
    """The object's state does not allow this now."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class ServerStartingError(EngineDeadError):
    """The server has not finished its start."""


class NotServedError(UserError):
    """The adapter to change is not served."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpError:
    """An error as the client will see it."""

    status: int
    detail: ErrorDetail
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """The phrase of the HTTP status."""
        return HTTPStatus(self.status).phrase

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(error=self.detail))

    def response(self) -> Response:
        return Response(
            self.body(), status_code=self.status, headers=self.headers, media_type="application/json"
        )


def describe(error: Exception) -> HttpError:
    """Return how an exception is shown to a client. Exceptions that are not LoraplexErrors reveal no
    details."""
    message = str(error)
    match error:
        case ContextLengthError():  # clients shorten the conversation when they see this code
            return _http_error(400, message, param=error.param, code="context_length_exceeded")
        case InvalidRequestError():
            return _http_error(400, message, param=error.param)
        case UnknownModelError():
            return _http_error(404, message, param="model", code="model_not_found")
        case NotFoundError():
            return _http_error(404, message, param=error.param, code="not_found")
        case ConflictError():
            return _http_error(409, message, code=error.code)
        case NotServedError():
            return _http_error(404, message, param="lora_name", code="adapter_not_found")
        case AdapterConflictError():
            return _http_error(409, message, param="lora_name", code="adapter_busy")
        case AdapterFormatError():
            return _http_error(400, message, param=error.field or "lora_path")
        case AdapterFetchError():
            # The hub, the network or the disk is at fault, and the message says what to do: not a 5xx.
            return _http_error(400, message, param="lora_path", code="adapter_fetch_failed")
        case AdapterMismatchError():
            return _http_error(400, message, param="lora_path")
        case AdapterError():  # raised for a request, not for a load: the adapter was valid once
            return _http_error(400, _without_paths(message), param="model", code="adapter_unavailable")
        case PathNotAllowedError():
            return _http_error(403, message, param="lora_path", code="path_not_allowed")
        case BodyTooLargeError():
            return _http_error(413, message, code="body_too_large")
        case BodyTimeoutError():
            # The rest of the body may still come: it must not be read as the next request.
            return _http_error(408, message, code="body_timeout", headers={"connection": "close"})
        case HeaderTimeoutError():
            return _http_error(408, message, code="header_timeout")
        case HeadersTooLargeError():
            return _http_error(431, message, code="headers_too_large")
        case HttpVersionError():
            return _http_error(505, message, code="unsupported_http_version", kind=INVALID_REQUEST)
        case TransferCodingError():
            return _http_error(501, message, code="unsupported_transfer_encoding", kind=INVALID_REQUEST)
        case ContentEncodingError():
            headers = {"accept-encoding": "identity"}  # in a 415: what the server would accept
            return _http_error(415, message, code="unsupported_content_encoding", headers=headers)
        case QueueFullError():
            # Type and code are OpenAI's: its clients wait for `retry-after` and retry by themselves.
            headers = {"retry-after": str(error.retry_after_s)}
            return _http_error(429, message, code="rate_limit_exceeded", kind=error.kind, headers=headers)
        case BusyError():
            return _http_error(503, message, code="overloaded", headers={"retry-after": "1"})
        case UnauthorizedError():
            headers = {"www-authenticate": "Bearer"}
            return _http_error(401, message, code="invalid_api_key", headers=headers)
        case InvalidHostError():
            return _http_error(400, message, code="invalid_host")
        case ForbiddenError():
            return _http_error(403, message, code=error.code)
        case CapacityError():
            return _http_error(400, message, code="capacity_exceeded")
        case UserError():
            return _http_error(400, message)
        case DiskFullError():  # a 5xx: the same request succeeds when there is room
            return _http_error(507, message, code="disk_full")
        case StorageError():
            # Nothing is wrong with this process, and the message says what to fix: not a 5xx.
            return _http_error(409, message, code="storage_failed")
        case ServerStartingError():
            return _http_error(503, message, code="starting", headers={"retry-after": _RETRY_AFTER_S})
        case EngineClosedError():
            return _http_error(503, message, code="shutting_down", headers={"retry-after": _RETRY_AFTER_S})
        case EngineDeadError():
            headers = {"retry-after": _RETRY_AFTER_S}
            return _http_error(503, _without_paths(message), code="engine_down", headers=headers)
        case LoraplexError():
            return _http_error(500, _without_paths(message))
        case _:
            return _http_error(500, "internal error; the server's log has the details")


def counts_for_tenant(error: BaseException | None) -> bool:
    """Return whether a request that ended with this error counts against its tenant's limits: unless it was
    refused with 429, or the server failed."""
    if not isinstance(error, Exception) or isinstance(error, ClientDisconnect):
        return True
    status = describe(error).status
    return status != HTTPStatus.TOO_MANY_REQUESTS and status < HTTPStatus.INTERNAL_SERVER_ERROR


def install_error_handlers(app: FastAPI) -> None:
    """Route every exception, ours or not, through `describe`."""

    async def on_our_error(request: Request, error: Exception) -> Response:
        http_error = describe(error)
        request_record(request.scope).fail(error)
        # A dead engine is logged once by its supervisor, not again for every request.
        is_ours = http_error.status >= 500 or isinstance(error, StorageError)
        if is_ours and not isinstance(error, EngineDeadError):
            logger.warning("%s %s: %s", request.method, request.url.path, error)
        return http_error.response()

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, headers = shorten(request.url.path), dict(error.headers or {})
        message = {
            404: f"there is no {path} on this server",
            405: f"{request.method} is not allowed on {path}; send {headers.get('Allow', 'another method')}",
        }.get(error.status_code, str(error.detail))
        return _http_error(error.status_code, message, headers=headers).response()

    async def on_hang_up(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client is gone, so nobody reads it

    async def on_bug(request: Request, error: Exception) -> Response:
        # Starlette raises it again after the response, so that the server logs the traceback.
        return describe(error).response()

    app.add_exception_handler(LoraplexError, on_our_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, on_hang_up)
    app.add_exception_handler(Exception, on_bug)


def _http_error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    kind: str | None = None,
    headers: dict[str, str] | None = None,
) -> HttpError:
    """Return an HTTP error. `kind`: the error's type, if it does not follow from the status."""
    kind = kind or (SERVER_ERROR if status >= 500 else INVALID_REQUEST)
    named = None if param is None else _encodable(param)
    detail = ErrorDetail(message=_encodable(message), type=kind, param=named, code=code)
    return HttpError(status=status, detail=detail, headers=headers or {})


def _without_paths(message: str) -> str:
    """Replace file paths in an engine's reason for its death, which was written for the operator."""
    return _PATH.sub("(a path)", message)


def _encodable(text: str) -> str:
    """Replace invalid Unicode: messages quote what a client sent, or file names."""
    return text.encode("utf-8", "replace").decode("utf-8")
