"""Files and batches as they are stored and answered: OpenAI's objects."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from loraplex.server.durations import DURATION_PATTERN

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
MAX_PAGE: Final = 10_000
MAX_WINDOW_CHARS: Final = 32


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file. `purpose`: batch for an uploaded one, batch_output for the results of a batch."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchStatus(StrEnum):
    """
    VALIDATING ─▶ IN_PROGRESS ─▶ FINALIZING ─▶ COMPLETED
         │             │  ╲
         ▼             │   ╲──▶ EXPIRED
       FAILED          ▼
                   CANCELLING ─▶ CANCELLED
    """

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED: Final = frozenset(
    {BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """`line`: number of the line in the input file, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchWait(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch does not go on, and what helps."""

    code: Literal["disk_full", "storage_failed"]
    message: str


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch; times are in seconds since 1970. The id of a file of results is there when the batch has
    ended, if there are any. `waits`: why it does not go on now; None if nothing keeps it. Only the server
    that runs it knows that: a full disk takes no note."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = BatchStatus.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    waits: BatchWait | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch on disk. `tenant`: whose key made it; empty without tenants. `base_model`: its server's, as the
    registry of adapters knows it. `result_id`, `failure_id`: the files that results are written to from the
    beginning."""

    batch: BatchObject
    tenant: str
    base_model: str
    result_id: str
    failure_id: str


class CreateBatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`completion_window`: the time until the batch expires, as 24h, 90m or 7d."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[
        str, Meta(max_length=MAX_WINDOW_CHARS, extra_json_schema={"pattern": DURATION_PATTERN})
    ]
    metadata: Metadata | None = None


class PageQuery(msgspec.Struct, kw_only=True):
    """The query of a list. `after`: the last id of the page before."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20


class FilesQuery(PageQuery, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


def new_id(kind: Literal["file", "batch"], now_s: float) -> str:
    """Return an id that sorts by time and cannot be guessed."""
    prefix = "file-" if kind == "file" else "batch_"
    return f"{prefix}{int(now_s * 1000):012x}{secrets.token_hex(10)}"
