"""Routes for files and batches, in OpenAI's format."""

from __future__ import annotations

import asyncio
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from loraplex.core.errors import InvalidRequestError
from loraplex.server.batches.objects import (
    BatchList,
    BatchObject,
    CreateBatchRequest,
    DeletedFile,
    FileList,
    FileObject,
    FilesQuery,
    PageQuery,
    new_id,
)
from loraplex.server.batches.store import BatchStore, OwnedFiles
from loraplex.server.batches.upload import receive_file
from loraplex.server.body import read_query
from loraplex.server.deps import ServerDeps
from loraplex.server.durations import duration_s
from loraplex.server.model_routes import json_response
from loraplex.server.openapi import operation
from loraplex.server.tenants.access import access_of

_FILE: Final = "/v1/files/{file_id}"
_BATCH: Final = "/v1/batches/{batch_id}"
_CHANGE_ERRORS: Final = (401, 404, 409, 507)
_READ_ERRORS: Final = (401, 404, 409)
_JSON_LINES: Final = "application/jsonl"
_MAX_WINDOW_S: Final = 30 * 86400


def batch_router(deps: ServerDeps, store: BatchStore) -> APIRouter:
    router = APIRouter()
    _add_files(router, deps, store)
    _add_batches(router, deps, store)
    return router


def _owned(store: BatchStore, request: Request) -> OwnedFiles:
    return store.owned_by(access_of(request.scope).tenant)


def _add_files(router: APIRouter, deps: ServerDeps, store: BatchStore) -> None:
    form = {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "format": "binary"},
    }

    @router.post(
        "/v1/files",
        **operation(
            summary="Upload the input of a batch", form=form, answer=FileObject, errors=(401, 409, 507)
        ),
    )
    async def upload(request: Request) -> Response:
        file = await receive_file(request, _owned(store, request), idle_timeout_s=deps.bodies.read_timeout_s)
        return json_response(file)

    @router.get(
        "/v1/files",
        **operation(summary="List the files", query=FilesQuery, answer=FileList, errors=(401, 409)),
    )
    async def files(request: Request) -> Response:
        query = read_query(request, FilesQuery)
        found, has_more = await asyncio.to_thread(_owned(store, request).files, query)
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return json_response(FileList(data=found, first_id=first, last_id=last, has_more=has_more))

    @router.get(
        _FILE, **operation(summary="Describe a file", path="file_id", answer=FileObject, errors=_READ_ERRORS)
    )
    async def file(request: Request) -> Response:
        owned = _owned(store, request)
        return json_response(await asyncio.to_thread(owned.file, request.path_params["file_id"]))

    @router.get(
        f"{_FILE}/content",
        **operation(
            summary="The content of a file", path="file_id", answer_text=_JSON_LINES, errors=_READ_ERRORS
        ),
    )
    async def content(request: Request) -> Response:
        owned = _owned(store, request)
        found = await asyncio.to_thread(owned.file, request.path_params["file_id"])
        return FileResponse(
            owned.content_path(found.id), media_type=_JSON_LINES, filename=f"{found.id}.jsonl"
        )

    @router.delete(
        _FILE,
        **operation(summary="Delete a file", path="file_id", answer=DeletedFile, errors=_READ_ERRORS),
    )
    async def delete(request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await asyncio.to_thread(_owned(store, request).delete_file, file_id)
        return json_response(DeletedFile(id=file_id))


def _add_batches(router: APIRouter, deps: ServerDeps, store: BatchStore) -> None:
    @router.post(
        "/v1/batches",
        **operation(
            summary="Run the requests of a file", body=CreateBatchRequest, answer=BatchObject,
            errors=_CHANGE_ERRORS,
        ),
    )  # fmt: skip
    async def create(request: Request) -> Response:
        async with deps.bodies.read(request, CreateBatchRequest) as body:
            now_s = store.wall_clock_s()
            batch = BatchObject(
                id=new_id("batch", now_s),
                endpoint=body.endpoint,
                input_file_id=body.input_file_id,
                completion_window=body.completion_window,
                created_at=int(now_s),
                expires_at=int(now_s) + _window_s(body.completion_window),
                metadata=body.metadata,
            )
            made = await asyncio.to_thread(_owned(store, request).create_batch, batch)
        store.changed()
        return json_response(made)

    @router.get(
        "/v1/batches",
        **operation(summary="List the batches", query=PageQuery, answer=BatchList, errors=(401, 409)),
    )
    async def batches(request: Request) -> Response:
        query = read_query(request, PageQuery)
        found, has_more = await asyncio.to_thread(_owned(store, request).batches, query)
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return json_response(BatchList(data=found, first_id=first, last_id=last, has_more=has_more))

    @router.get(
        _BATCH,
        **operation(summary="Describe a batch", path="batch_id", answer=BatchObject, errors=_READ_ERRORS),
    )
    async def batch(request: Request) -> Response:
        owned = _owned(store, request)
        return json_response(await asyncio.to_thread(owned.batch, request.path_params["batch_id"]))

    @router.post(
        f"{_BATCH}/cancel",
        **operation(summary="Cancel a batch", path="batch_id", answer=BatchObject, errors=_CHANGE_ERRORS),
    )
    async def cancel(request: Request) -> Response:
        owned = _owned(store, request)
        found = await asyncio.to_thread(owned.cancel, request.path_params["batch_id"])
        store.changed()
        return json_response(found)


def _window_s(window: str) -> int:
    seconds = duration_s(window)
    if seconds is None or seconds < 1:
        raise InvalidRequestError(
            f"completion_window is {window!r}; give minutes, hours or days, such as 90m, 24h or 30d",
            param="completion_window",
        )
    if seconds > _MAX_WINDOW_S:
        raise InvalidRequestError(
            f"completion_window is {window!r}; at most 30d are possible", param="completion_window"
        )
    return int(seconds)
