"""Classify an error that ends a request, for the metrics and the request log."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.core.errors import EngineClosedError
from loraplex.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended a request. `kind` is its class, because its message may quote what a client sent.

    `finish_reason` is that of the choices it left unfinished.
    """

    kind: str
    finish_reason: FinishReason

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error. A server that shuts down has not failed: it cancels the requests it does not
        finish."""
        is_shutdown = isinstance(error, EngineClosedError)
        return cls(type(error).__name__, FinishReason.CANCELLED if is_shutdown else FinishReason.ERROR)
