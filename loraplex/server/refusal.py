"""Refuse requests before they reach a route, in middleware and while the server starts."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from loraplex.server.audit import audit_refusal
from loraplex.server.errors import describe
from loraplex.server.request_log import request_record


def note_refusal(scope: Scope, error: Exception) -> None:
    """Record an error in the request log and, if the request asked for a change of an adapter, in the audit
    log."""
    request_record(scope).fail(error)
    audit_refusal(scope, error)


async def refuse(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error, and record it."""
    note_refusal(scope, error)
    await describe(error).response()(scope, receive, send)
