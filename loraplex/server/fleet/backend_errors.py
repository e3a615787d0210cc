"""Convert a server's errors to our own."""

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
from loraplex.server.decoders import decode_json
from loraplex.server.errors import SERVER_ERROR, QueueFullError
from loraplex.server.fleet.backend_http import Answer

ENGINE_DOWN: Final = "engine_down"
"""The code of loraplex's errors if its engine died, perhaps because of the request."""
_TOO_LONG: Final = ("maximum context length", "maximum model length")
"""Phrases of vLLM, which has no code for it, when prompt and answer exceed the context."""


class BackendBusyError(QueueFullError, CapacityError):
    """The server accepts no more requests for now (its 429)."""


class UnavailableError(EngineDeadError):
    """The server, or a gateway before it, accepts no requests for now: it is starting or shutting down."""


class ModelUnknownError(EngineDeadError):
    """The server does not know the model: an adapter it had was unloaded there."""


class NotAcceptedError(RequestMovedError):
    """The server went away before it began to answer the request, so the request is not the cause."""


class AdapterMissingError(NotTakenError):
    """The server is healthy, but refuses to load an adapter again that it had."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The error in a body or a stream event, in the format of both vLLM and loraplex."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail | str


def error_detail(answer: Answer) -> ErrorDetail:
    """Return the error in a body, or its first characters if the format is unknown."""
    try:
        error = decode_json(answer.body, _ErrorBody).error
    except msgspec.DecodeError:
        text = answer.body[:200].decode("utf-8", "replace").strip()
        return ErrorDetail(message=text or f"HTTP {answer.status}")
    return ErrorDetail(message=error) if isinstance(error, str) else error


def request_error(answer: Answer, url: str) -> LoraplexError:
    """Return the error for a generation request answered with a status other than 200."""
    detail, status = error_detail(answer), answer.status
    if status in (502, 503, 504) and detail.code != ENGINE_DOWN:
        return UnavailableError(f"the server at {url} is not ready (HTTP {status}: {detail.message})")
    if status >= 500:
        return EngineDeadError(f"the server at {url} failed (HTTP {status}: {detail.message})")
    if status in (401, 403):
        # The fleet's client cannot do anything about it, and another replica may accept the request.
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
    """Return the error that ends a stream whose status was 200.

    A failure of this request alone becomes a plain LoraplexError or an AdapterError.
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
    """Return the error for a request that is itself wrong."""
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
