"""The OpenAPI document. Its bodies and answers are the structs that the server decodes and encodes."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from loraplex.server.adapter_responses import AdapterList, DemandInfo, Model, ModelList, TenantList
from loraplex.server.batches.objects import (
    BatchList,
    BatchObject,
    CreateBatchRequest,
    DeletedFile,
    FileList,
    FileObject,
)
from loraplex.server.generation_responses import ChatCompletion, Completion, Response
from loraplex.server.requests import (
    AdapterNameRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LeaveRequest,
    LoadAdapterRequest,
    PlacementRequest,
    ReplicaRequest,
    RollBackAdapterRequest,
    ScaleRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from loraplex.server.response_api.request import ResponsesRequest
from loraplex.server.responses import (
    ErrorBody,
    Health,
    Overview,
    Placement,
    ReplicaList,
    Text,
    Tokens,
    Version,
)

_REF: Final = "#/components/schemas/{name}"
_ERROR_TEXT: Final = {
    400: "The request is wrong; the message says what and how to fix it",
    401: "No valid API key",
    403: "The client may not do this, or not load adapters from this path or repository",
    404: "There is no such model, adapter, file or batch",
    408: "The request body did not arrive in time",
    409: "The adapter is being changed by another call, the state of a file or batch does not allow this, or "
    "the state directory cannot be written",
    413: "The request body is too large",
    415: "The request body is compressed",
    429: "The queue is full, or a limit of the tenant reached; try again after `retry-after` seconds",
    500: "This request failed in the server",
    503: "The engine is down or restarting, or the server is overloaded; try again",
    507: "The disk of the state directory is full",
}
BODY_ERRORS: Final = (400, 408, 413, 415, 503)

_STRUCTS: Final = (
    ChatRequest, CompletionRequest, LoadAdapterRequest, UnloadAdapterRequest, AdapterNameRequest,
    RollBackAdapterRequest, TokenizeRequest, DetokenizeRequest, ChatCompletion, Completion, Model, ModelList,
    AdapterList, DemandInfo, Tokens, Text, Version, Health, ReplicaRequest, LeaveRequest,
    ScaleRequest, ReplicaList, PlacementRequest, Placement, TenantList, Overview, FileObject, FileList,
    ResponsesRequest, Response, DeletedFile, CreateBatchRequest, BatchObject, BatchList, ErrorBody,
)  # fmt: skip


def operation(
    *,
    summary: str,
    path: str | None = None,
    query: type[msgspec.Struct] | None = None,
    body: type[msgspec.Struct] | None = None,
    form: dict[str, Any] | None = None,
    answer: type[msgspec.Struct] | None = None,
    answer_text: str | None = None,
    streams: bool = False,
    errors: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Return keyword arguments that describe a route.

    `path` names a parameter in its path; the fields of `query` are those of its query. `form` has the
    schemas of the fields of a multipart form. `answer_text` is the media type of a textual answer.
    """
    content: dict[str, Any] = {}
    if answer is not None:
        content["application/json"] = {"schema": _reference(answer)}
    if streams:
        content["text/event-stream"] = {}  # OpenAPI has no schema for a stream of events
    if answer_text is not None:
        content[answer_text] = {"schema": {"type": "string"}}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "Success", "content": content}}
    query_errors = () if query is None else (400,)
    for status in sorted({*errors, *query_errors, *(BODY_ERRORS if body or form else ())}):
        responses[status] = {
            "description": _ERROR_TEXT[status],
            "content": {"application/json": {"schema": _reference(ErrorBody)}},
        }
    extra: dict[str, Any] = {}
    if form is not None:
        schema = {
            "type": "object",
            "properties": form,
            "required": list(form),
            "additionalProperties": False,
        }
        extra["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    if path is not None:
        extra["parameters"] = [{"name": path, "in": "path", "required": True, "schema": {"type": "string"}}]
    if query is not None:
        fields = msgspec.json.schema(query)["$defs"][query.__name__]["properties"]
        extra["parameters"] = [
            {"name": name, "in": "query", "schema": field} for name, field in fields.items()
        ]
    if body is not None:
        extra["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(body)}},
        }
    return {"summary": summary, "responses": responses, "openapi_extra": extra}


def install_openapi(app: FastAPI) -> None:
    """Add the structs' schemas and the API-key scheme to the document that FastAPI makes of the routes."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            made["components"] = {
                "schemas": schemas,
                "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}},
            }
            # The empty alternative: a server without keys requires none.
            made["security"] = [{"api_key": []}, {}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    assert kind in _STRUCTS, "the document must define what it refers to"
    return {"$ref": _REF.format(name=kind.__name__)}
