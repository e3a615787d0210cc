"""Models, adapters and their administration; the last in vLLM's shape, so that its tools work here."""

from __future__ import annotations

import time
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loraplex.core.stats import AdapterStats
from loraplex.server.adapter_service import ServedAdapter
from loraplex.server.audit import AdapterChange, audited
from loraplex.server.body import read_struct
from loraplex.server.deps import ServerDeps
from loraplex.server.openapi import operation
from loraplex.server.requests import LoadAdapterRequest, UnloadAdapterRequest
from loraplex.server.responses import AdapterInfo, AdapterList, Model, ModelList

_TEXT: Final = "text/plain"


def model_router(deps: ServerDeps) -> APIRouter:
    router = APIRouter()
    started_unix_s = int(time.time())

    @router.get("/v1/models", **operation(summary="List the models", answer=ModelList, errors=(401,)))
    async def models() -> Response:
        return json_response(ModelList(data=_models(deps, started_unix_s)))

    @router.get(
        "/v1/adapters", **operation(summary="List the adapters", answer=AdapterList, errors=(401, 503))
    )
    async def adapters() -> Response:
        stats = await deps.text.engine.stats()
        by_version = {adapter.version: adapter for adapter in stats.adapters}
        served = deps.adapters.served()
        data = [_adapter_info(deps, adapter, by_version.get(adapter.version)) for adapter in served]
        return json_response(AdapterList(data=data))

    @router.post(
        "/v1/load_lora_adapter",
        **operation(
            summary="Load an adapter, or reload it with load_inplace",
            body=LoadAdapterRequest,
            answer_text=_TEXT,
            errors=(401, 403, 409, 503),
        ),
    )
    async def load_lora_adapter(request: Request) -> Response:
        body = await read_struct(request, LoadAdapterRequest, deps.limits)
        old_version = deps.adapters.version_of(body.lora_name)
        change = AdapterChange(
            verb="load" if old_version is None else "reload",
            name=body.lora_name,
            source=body.lora_path,
            old_version=old_version,
        )
        with audited(request, change, deps.metrics.clock):
            adapter = await deps.adapters.load(body.lora_name, body.lora_path, replace=body.load_inplace)
            change.new_version = adapter.version
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(
        "/v1/unload_lora_adapter",
        **operation(
            summary="Unload an adapter after its requests in flight",
            body=UnloadAdapterRequest,
            answer_text=_TEXT,
            errors=(401, 404, 409, 503),
        ),
    )
    async def unload_lora_adapter(request: Request) -> Response:
        body = await read_struct(request, UnloadAdapterRequest, deps.limits)
        name = body.lora_name
        change = AdapterChange(verb="unload", name=name, old_version=deps.adapters.version_of(name))
        with audited(request, change, deps.metrics.clock):
            drained = await deps.adapters.unload(
                name,
                drain_timeout_s=deps.drain_timeout_s,
                # Not after the drain: by then the name may be another adapter's, with counters of its own.
                on_removed=lambda: deps.metrics.forget(name),
            )
            if not drained:
                change.note = "requests in flight are draining"
        if drained:
            return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
        return PlainTextResponse(
            f"Success: LoRA adapter '{name}' takes no new requests; those in flight are draining."
        )

    return router


def json_response(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _models(deps: ServerDeps, created: int) -> list[Model]:
    base, max_model_len = deps.adapters.base_model, deps.text.max_model_len
    models = [Model(id=base, created=created, root=deps.base_root, parent=None, max_model_len=max_model_len)]
    for adapter in deps.adapters.served():
        root = str(adapter.spec.path)
        models.append(
            Model(id=adapter.name, created=created, root=root, parent=base, max_model_len=max_model_len)
        )
    return models


def _adapter_info(deps: ServerDeps, adapter: ServedAdapter, stats: AdapterStats | None) -> AdapterInfo:
    """`stats` is None for a moment after the engine was restarted; the adapter then is on disk only."""
    traffic = deps.metrics.find_traffic(adapter.name)
    return AdapterInfo(
        name=adapter.name,
        version=adapter.version,
        path=str(adapter.spec.path),
        rank=adapter.spec.max_rank,
        bytes=stats.num_bytes if stats else 0,
        tier=stats.tier if stats else "disk",
        in_flight=stats.in_flight if stats else 0,
        hits=stats.hits if stats else 0,
        loads=stats.loads if stats else 0,
        requests=traffic.num_requests if traffic else 0,
        tokens=traffic.num_tokens if traffic else 0,
    )
