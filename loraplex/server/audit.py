"""The audit log: one line for each change of an adapter that a request asked for, done or not.

What a server loads by itself when it starts is not in it: the banner and the registry list that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from loraplex.core.clock import Clock
from loraplex.core.errors import UserError
from loraplex.core.logs import fields
from loraplex.server.request_log import RequestRecord, request_record, short_version, shorten

logger = logging.getLogger("loraplex.audit")

_MAX_REASON_CHARS = 300


@dataclass(kw_only=True, slots=True)
class AdapterChange:
    """A load or unload under way. Versions are those that the name stands for before and after it."""

    verb: str
    name: str
    source: str | None = None
    old_version: str | None = None
    new_version: str | None = None
    note: str | None = None


@contextmanager
def audited(request: Request, change: AdapterChange, clock: Clock) -> Iterator[AdapterChange]:
    """Log a change when the block ends: as done, as refused for a reason of the client's, or as failed."""
    started_s = clock.now_s()
    record = request_record(request.scope)
    try:
        yield change
    except BaseException as error:
        result = "refused" if isinstance(error, UserError) else "failed"
        reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
        _write(record, change, result, clock.now_s() - started_s, reason)
        raise
    _write(record, change, "done", clock.now_s() - started_s, None)


def _write(
    record: RequestRecord, change: AdapterChange, result: str, seconds: float, reason: str | None
) -> None:
    message = f"adapter {change.verb}" + ("" if result == "done" else f" {result}")
    level = logging.WARNING if result == "failed" else logging.INFO
    logger.log(
        level,
        message,
        extra=fields(
            request_id=record.request_id,
            adapter=shorten(change.name),
            old_version=short_version(change.old_version),
            new_version=short_version(change.new_version),
            source=None if change.source is None else shorten(change.source),
            result=result,
            seconds=round(seconds, 3),
            note=change.note,
            reason=reason,
            client=record.client,
            key=record.key_kind,
        ),
    )
