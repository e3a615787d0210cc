"""The audit log: one line for each requested change of an adapter or of a fleet's replicas, done or not.

If a change staged a version, one more line before it says so. A refused request is logged by the code that
refuses it: the route, or a middleware before it (see `refusal`). Adapters that a server loads by itself at
the start are not logged here: the banner and the registry list them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from starlette.types import Scope

from loraplex.core.clock import Clock
from loraplex.core.errors import UserError
from loraplex.core.logs import fields
from loraplex.core.url_secrets import without_secrets
from loraplex.server.request_log import RequestRecord, request_record, short_version, shorten

logger = logging.getLogger("loraplex.audit")

LOAD_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_PATH: Final = "/v1/unload_lora_adapter"
PROMOTE_PATH: Final = "/v1/promote_lora_adapter"
ABORT_PATH: Final = "/v1/abort_lora_adapter"
ROLL_BACK_PATH: Final = "/v1/rollback_lora_adapter"

_VERBS: Final = {
    LOAD_PATH: "load",
    UNLOAD_PATH: "unload",
    PROMOTE_PATH: "promote",
    ABORT_PATH: "abort",
    ROLL_BACK_PATH: "rollback",
}
_MAX_REASON_CHARS: Final = 300


@dataclass(kw_only=True, slots=True)
class AdapterChange:
    """A change of an adapter in progress. `old_version` and `new_version` are what the name stands for before
    and after it; for a canary, which the name does not stand for, they are the canary that ends and the one
    that begins.

    `name` is None until the request's body was read. `on_staged` logs a version that is ready on all
    replicas.
    """

    verb: str
    on_staged: Callable[[str], None] = lambda version: None
    name: str | None = None
    source: str | None = None
    old_version: str | None = None
    new_version: str | None = None
    note: str | None = None


@contextmanager
def audited(scope: Scope, clock: Clock) -> Iterator[AdapterChange]:
    """Log the change that a request asks for when the block ends: as done, as refused because of the client,
    or as failed. The block fills in the fields as it learns them."""
    started_s = clock.now_s()
    record, change = request_record(scope), AdapterChange(verb=_VERBS[scope["path"]])

    def on_staged(version: str) -> None:
        staged = replace(change, verb="stage", new_version=version)
        _write(record, staged, None, clock.now_s() - started_s)

    change.on_staged = on_staged
    try:
        yield change
    except BaseException as error:
        _write(record, change, error, clock.now_s() - started_s)
        raise
    _write(record, change, None, clock.now_s() - started_s)


@contextmanager
def audited_replicas(scope: Scope, clock: Clock, **asked: int | None) -> Iterator[None]:
    """Log a change of a fleet's replicas when the block ends. `asked`: the fields of the request's body."""
    started_s, record = clock.now_s(), request_record(scope)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        verb = scope["path"].rpartition("/")[2]
        if scope["method"] == "DELETE":
            verb = f"release {verb}"
        _log(record, f"fleet {verb}", error, clock.now_s() - started_s, **asked)


def audit_refusal(scope: Scope, error: Exception) -> None:
    """Log a change that is refused before its route is reached; do nothing for other requests."""
    verb = _VERBS.get(scope["path"])
    if verb is not None and scope["method"] == "POST":
        _write(request_record(scope), AdapterChange(verb=verb), error, 0.0)


def _write(record: RequestRecord, change: AdapterChange, error: BaseException | None, seconds: float) -> None:
    _log(
        record,
        f"adapter {change.verb}",
        error,
        seconds,
        adapter=None if change.name is None else shorten(change.name),
        old_version=short_version(change.old_version),
        new_version=short_version(change.new_version),
        source=None if change.source is None else shorten(without_secrets(change.source)),
        note=change.note,
    )


def _log(
    record: RequestRecord, what: str, error: BaseException | None, seconds: float, **about: str | int | None
) -> None:
    result = "done" if error is None else "refused" if isinstance(error, UserError) else "failed"
    reason = (
        None if error is None else without_secrets(f"{type(error).__name__}: {error}")[:_MAX_REASON_CHARS]
    )
    note = about.pop("note", None)
    logger.log(
        logging.WARNING if result == "failed" else logging.INFO,
        what if result == "done" else f"{what} {result}",
        extra=fields(
            request_id=record.request_id,
            **about,
            result=result,
            seconds=round(seconds, 3),
            note=note,
            reason=reason,
            client=record.client,
            key=record.key_kind,
            tenant=record.tenant,
        ),
    )
