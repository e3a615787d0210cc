"""What a server says is wrong, as our own errors."""

from __future__ import annotations

from typing import Final

import msgspec

from loraplex.core.errors import (
    AdapterError,
    CapacityError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    LoraplexError,
    RequestMovedError,
)
from loraplex.server.continuing import NotTakenError
from loraplex.server.errors import SERVER_ERROR, QueueFullError
from loraplex.server.fleet.backend_http import Answer

ENGINE_DOWN: Final = "engine_down"
"""What loraplex answers with if its engine died, perhaps of the request."""
_TOO_LONG: Final = ("maximum context length", "maximum model length")
"""How vLLM, which has no code for it, says that prompt and answer do not fit the context."""


class BackendBusyError(QueueFullError, CapacityError):
    """The server takes no more requests for now (its 429)."""


class UnavailableError(EngineDeadError):
    """The server, or a gateway before it, takes no requests for now: it starts, or shuts down."""


class ModelUnknownError(EngineDeadError):
    """The server does not know the model: an adapter that it had was unloaded there."""


class NotAcceptedError(RequestMovedError):
    """The server went away before it had begun to answer the request, which says nothing about that."""


class AdapterMissingError(NotTakenError):
    """The server is well, but does not take an adapter again that it had."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a body or a stream event, as both vLLM and loraplex write it."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail | str


def error_detail(answer: Answer) -> ErrorDetail:
    """Return the error of a body; its first characters if it is of no known shape."""
    try:
        error = msgspec.json.decode(answer.body, type=_ErrorBody).error
    except msgspec.DecodeError:
        text = answer.body[:200].decode("utf-8", "replace").strip()
        return ErrorDetail(message=text or f"HTTP {answer.status}")
    return ErrorDetail(message=error) if isinstance(error, str) else error


def request_error(answer: Answer, url: str) -> LoraplexError:
    """The error of a generation request that was answered with another status than 200."""
    detail, status = error_detail(answer), answer.status
    if status in (502, 503, 504) and detail.code != ENGINE_DOWN:
        return UnavailableError(f"the server at {url} is not ready (HTTP {status}: {detail.message})")
    if status >= 500:
        return EngineDeadError(f"the server at {url} failed (HTTP {status}: {detail.message})")
    if status in (401, 403):
        # Nothing the client of the fleet could do about it, and another replica may take the request.
        return EngineDeadError(
            f"the server at {url} refuses the fleet's API key (HTTP {status}: {detail.message})"
        )
    if status == 404:
        return ModelUnknownError(f"the server at {url} does not know the model (HTTP 404: {detail.message})")
    if status == 429:
        return BackendBusyError(
            detail.message, kind=detail.type or "requests", retry_after_s=_retry_after_s(answer)
        )
    return _refusal(detail)


def stream_error(detail: ErrorDetail, url: str) -> LoraplexError:
    """The error that ends a stream whose status was 200 already.

    Of a failure of this request alone it is a plain LoraplexError or an AdapterError.
    """
    match detail:
        case ErrorDetail(code="shutting_down"):
            return EngineClosedError(detail.message)
        case ErrorDetail(code=None, type=kind) if kind == SERVER_ERROR:
            return LoraplexError(detail.message)
        case ErrorDetail(code=int() as status) if status < 500:
            return _refusal(detail)
        case ErrorDetail(code=str() as code) if code not in (ENGINE_DOWN, "starting"):
            return _refusal(detail)
        case _:
            return EngineDeadError(f"the server at {url} failed ({detail.message})")


def _refusal(detail: ErrorDetail) -> LoraplexError:
    """Something is wrong with the request itself."""
    message, code = detail.message, detail.code
    if code == "context_length_exceeded" or any(words in message for words in _TOO_LONG):
        return ContextLengthError(message, param="prompt")
    if code == "capacity_exceeded":
        return CapacityError(message)
    if code == "adapter_unavailable":
        return AdapterError(message)
    return InvalidRequestError(message, param=detail.param)


def _retry_after_s(answer: Answer) -> int:
    header = next((value for name, value in answer.headers.items() if name.lower() == "retry-after"), "")
    return int(header) if header.isascii() and header.isdecimal() else 1
