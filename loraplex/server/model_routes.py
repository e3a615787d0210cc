"""Routes for models, adapters and their administration; the latter in vLLM's format, so that its tools work
here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loraplex.core.stats import AdapterStats
from loraplex.server.adapter_responses import (
    AdapterDemandInfo,
    AdapterInfo,
    AdapterList,
    CanaryInfo,
    DemandInfo,
    EngineInfo,
    Model,
    ModelList,
    PreviousVersion,
)
from loraplex.server.audit import ABORT_PATH, LOAD_PATH, PROMOTE_PATH, ROLL_BACK_PATH, UNLOAD_PATH, audited
from loraplex.server.auth import Administrators
from loraplex.server.body import read_query
from loraplex.server.decoders import decode_json
from loraplex.server.deps import ServerDeps
from loraplex.server.metrics import Traffic
from loraplex.server.openapi import operation
from loraplex.server.request_log import VERSION_HEADER
from loraplex.server.requests import (
    AdapterNameRequest,
    AdapterQuery,
    LoadAdapterRequest,
    RollBackAdapterRequest,
    UnloadAdapterRequest,
)
from loraplex.server.served_adapter import ServedAdapter, ServedCanary
from loraplex.server.tenants.access import Access, access_of

_TEXT: Final = "text/plain"
_NEVER_REQUESTED: Final = Traffic()


def model_router(deps: ServerDeps) -> APIRouter:
    router = APIRouter()
    administrators = Administrators(deps.admin_keys, has_tenants=deps.tenants is not None)
    _add_lists(router, deps, administrators)
    _add_changes(router, deps, administrators)
    _add_rollouts(router, deps, administrators)
    return router


def _add_lists(router: APIRouter, deps: ServerDeps, administrators: Administrators) -> None:
    started_unix_s = int(time.time())

    @router.get("/v1/models", **operation(summary="List the models", answer=ModelList, errors=(401,)))
    async def models(request: Request) -> Response:
        shows_paths = administrators.include(request.scope)
        models = _models(deps, access_of(request.scope), started_unix_s, shows_paths=shows_paths)
        return json_response(ModelList(data=models))

    @router.get(
        "/v1/models/{model_id:path}",
        **operation(summary="Describe one model", path="model_id", answer=Model, errors=(401, 404)),
    )
    async def model(request: Request) -> Response:
        model_id = request.path_params["model_id"]
        if not model_id:
            return await models(request)
        shows_paths = administrators.include(request.scope)
        found = deps.adapters.find(model_id, access_of(request.scope))
        return json_response(_model(deps, model_id, found, started_unix_s, shows_paths=shows_paths))

    @router.get(
        "/v1/adapters",
        **operation(summary="List the adapters", query=AdapterQuery, answer=AdapterList, errors=(401, 503)),
    )
    async def adapters(request: Request) -> Response:
        query = read_query(request, AdapterQuery)
        shows_paths = administrators.include(request.scope)
        stats = await deps.text.engine.stats()
        by_version = {adapter.version: adapter for adapter in stats.adapters}
        access = access_of(request.scope)
        # In a thread: streams continue while thousands of adapters are looked up.
        served = deps.adapters.served()
        found = await asyncio.to_thread(_matching, deps, served, access, by_version, query)
        shown = found[query.offset : None if query.limit is None else query.offset + query.limit]
        data = [
            _adapter_info(deps, adapter, by_version, access, shows_paths=shows_paths) for adapter in shown
        ]
        return json_response(AdapterList(total=len(found), data=data))

    @router.get(
        "/v1/demand",
        **operation(
            summary="Requests of the last half hour by adapter", answer=DemandInfo, errors=(401, 403)
        ),
    )
    async def demand(request: Request) -> Response:
        administrators.require_operator(request.scope)
        return json_response(_demand_info(deps))


def _add_changes(router: APIRouter, deps: ServerDeps, administrators: Administrators) -> None:
    @router.post(
        LOAD_PATH,
        **operation(
            summary="Load an adapter, or reload it with load_inplace",
            body=LoadAdapterRequest,
            answer_text=_TEXT,
            errors=(401, 403, 409, 503, 507),
        ),
    )
    async def load_lora_adapter(request: Request) -> Response:
        with audited(request.scope, deps.metrics.clock) as change:
            administrators.require(request.scope)
            async with deps.bodies.read(request, LoadAdapterRequest) as body:
                change.name, change.source = body.lora_name, body.lora_path
                administrators.require_adapter(request.scope, body.lora_name)
                change.old_version = deps.adapters.version_of(body.lora_name)
                if body.canary_share is not None:
                    change.verb, change.note = "canary", f"share {body.canary_share:g}"
                elif change.old_version is not None:
                    change.verb = "reload"
                adapter = await deps.adapters.load(
                    body.lora_name,
                    body.lora_path,
                    replace=body.load_inplace,
                    canary_share=body.canary_share,
                    sources=access_of(request.scope).sources,
                    on_staged=change.on_staged,
                )
            loaded = adapter.version if adapter.canary is None else adapter.canary.version
            change.new_version = loaded
        outcome = (
            "added successfully"
            if adapter.canary is None
            else f"has a canary, version {loaded[:12]}, with a share of {adapter.canary.share:g}"
        )
        states = [] if deps.fleet is None else deps.fleet.adapter_states(loaded)
        return _success(body.lora_name, outcome, loaded, states)

    @router.post(
        UNLOAD_PATH,
        **operation(
            summary="Unload an adapter after its requests in flight",
            body=UnloadAdapterRequest,
            answer_text=_TEXT,
            errors=(401, 403, 404, 409, 503, 507),
        ),
    )
    async def unload_lora_adapter(request: Request) -> Response:
        with audited(request.scope, deps.metrics.clock) as change:
            administrators.require(request.scope)
            async with deps.bodies.read(request, UnloadAdapterRequest) as body:
                name = change.name = body.lora_name
            administrators.require_adapter(request.scope, name)
            change.old_version = deps.adapters.version_of(name)
            drained = await deps.adapters.unload(
                name,
                drain_timeout_s=deps.drain_timeout_s,
                access=access_of(request.scope),
                # Not after the drain: by then the name may belong to another adapter, with its own counters.
                on_removed=lambda: deps.metrics.forget(name),
            )
            change.note = None if drained else "requests in flight are draining"
        outcome = (
            "removed successfully" if change.note is None else f"unloaded from this server; {change.note}"
        )
        return _success(name, outcome)


def _add_rollouts(router: APIRouter, deps: ServerDeps, administrators: Administrators) -> None:
    errors = (401, 403, 404, 409, 503, 507)

    @router.post(
        PROMOTE_PATH,
        **operation(
            summary="Let an adapter's canary answer all of its requests",
            body=AdapterNameRequest,
            answer_text=_TEXT,
            errors=errors,
        ),
    )
    async def promote_lora_adapter(request: Request) -> Response:
        with audited(request.scope, deps.metrics.clock) as change:
            administrators.require(request.scope)
            async with deps.bodies.read(request, AdapterNameRequest) as body:
                name = change.name = body.lora_name
            administrators.require_adapter(request.scope, name)
            change.old_version = deps.adapters.version_of(name)
            access = access_of(request.scope)
            adapter = await deps.adapters.promote(name, access=access, on_staged=change.on_staged)
            change.new_version = adapter.version
        return _success(name, f"is version {adapter.version[:12]} now", adapter.version)

    @router.post(
        ABORT_PATH,
        **operation(
            summary="End the trial of an adapter's canary",
            body=AdapterNameRequest,
            answer_text=_TEXT,
            errors=errors,
        ),
    )
    async def abort_lora_adapter(request: Request) -> Response:
        with audited(request.scope, deps.metrics.clock) as change:
            administrators.require(request.scope)
            async with deps.bodies.read(request, AdapterNameRequest) as body:
                name = change.name = body.lora_name
            administrators.require_adapter(request.scope, name)
            change.old_version = deps.adapters.canary_of(name)
            adapter = await deps.adapters.abort(name, access=access_of(request.scope))
            change.new_version = adapter.version
        return _success(name, f"is version {adapter.version[:12]} for all requests", adapter.version)

    @router.post(
        ROLL_BACK_PATH,
        **operation(
            summary="Let an adapter be the version that it was before",
            body=RollBackAdapterRequest,
            answer_text=_TEXT,
            errors=errors,
        ),
    )
    async def rollback_lora_adapter(request: Request) -> Response:
        with audited(request.scope, deps.metrics.clock) as change:
            administrators.require(request.scope)
            async with deps.bodies.read(request, RollBackAdapterRequest) as body:
                name = change.name = body.lora_name
            administrators.require_adapter(request.scope, name)
            change.old_version = deps.adapters.version_of(name)
            access = access_of(request.scope)
            adapter = await deps.adapters.roll_back(
                name, body.version, access=access, on_staged=change.on_staged
            )
            change.new_version = adapter.version
        return _success(name, f"is version {adapter.version[:12]} again", adapter.version)


def _success(name: str, outcome: str, version: str | None = None, replicas: Sequence[str] = ()) -> Response:
    """Answer as vLLM does, with the version that the change was about, and in a fleet its state on each
    replica."""
    headers = {} if version is None else {VERSION_HEADER.decode(): version}
    states = f" {'; '.join(replicas)}." if replicas else ""
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {outcome}.{states}", headers=headers)


def json_response(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _models(deps: ServerDeps, access: Access, created: int, *, shows_paths: bool) -> list[Model]:
    base = _model(deps, deps.adapters.base_model, None, created, shows_paths=shows_paths)
    return [
        *([base] if access.uses_base else []),
        *(
            _model(deps, each.name, each, created, shows_paths=shows_paths)
            for each in deps.adapters.served()
            if access.uses(each.name)
        ),
    ]


def _model(
    deps: ServerDeps, model_id: str, adapter: ServedAdapter | None, created: int, *, shows_paths: bool
) -> Model:
    """Return a model under the name that was requested; `adapter` is None for the base model."""
    root = deps.base_root if adapter is None else str(adapter.spec.path)
    return Model(
        id=model_id,
        created=created,
        root=root if shows_paths else None,
        parent=None if adapter is None else deps.adapters.base_model,
        max_model_len=deps.text.max_model_len,
    )


def visible_adapters(deps: ServerDeps, access: Access) -> list[ServedAdapter]:
    """Return the adapters that one with this access may know of, sorted by name."""
    return [each for each in deps.adapters.served() if access.sees(each.name)]


def _matching(
    deps: ServerDeps,
    served: Sequence[ServedAdapter],
    access: Access,
    by_version: Mapping[str, AdapterStats],
    query: AdapterQuery,
) -> list[ServedAdapter]:
    """Return the adapters that a query is about, in its order; none that its sender may not see."""
    part = query.contains.casefold()
    found = [
        each
        for each in served
        if access.sees(each.name)
        and part in each.name.casefold()
        and (query.tier is None or _stats_of(each.version, by_version).tier == query.tier)
    ]
    if query.order == "name":
        return found

    def value(adapter: ServedAdapter) -> int:
        if query.order == "rank":
            return adapter.spec.max_rank
        if not access.administers(adapter.name):
            return 0  # it is not shown
        if query.order == "loads":
            return _stats_of(adapter.version, by_version).loads
        traffic = deps.metrics.find_traffic(adapter.name)
        if traffic is None:
            return 0
        match query.order:
            case "requests":
                return traffic.num_requests
            case "tokens":
                return traffic.num_tokens
            case _:
                return traffic.num_in_flight

    return sorted(found, key=value, reverse=True)


def _adapter_info(
    deps: ServerDeps,
    adapter: ServedAdapter,
    by_version: Mapping[str, AdapterStats],
    access: Access,
    *,
    shows_paths: bool,
) -> AdapterInfo:
    """Return what one with this access may know of an adapter: the counts of its requests, which may be those
    of other tenants, are None unless it may change it, and replicas are shown to operators only."""
    shows_use = access.administers(adapter.name)
    traffic = (deps.metrics.find_traffic(adapter.name) or _NEVER_REQUESTED) if shows_use else None
    stats = _stats_of(adapter.version, by_version)
    fleet = deps.fleet if access.is_operator else None
    placed = None if fleet is None else fleet.placed_on(adapter.version)
    return AdapterInfo(
        name=adapter.name,
        version=adapter.version,
        path=str(adapter.spec.path) if shows_paths else None,
        source=adapter.ref.where if shows_paths else None,
        rank=adapter.spec.max_rank,
        bytes=_num_bytes(deps, stats, access),
        tier=stats.tier,
        held_by=None if fleet is None else fleet.holders(adapter.version),
        placed_on=None if placed is None else list(placed.replicas),
        in_flight=traffic.num_in_flight if traffic else None,
        hits=traffic.num_hits if traffic else None,
        loads=stats.loads if shows_use else None,
        requests=traffic.num_requests if traffic else None,
        tokens=traffic.num_tokens if traffic else None,
        canary=_canary_info(
            deps,
            adapter.canary,
            by_version,
            access,
            num_requests=traffic.num_canary_requests if traffic else None,
            shows_paths=shows_paths,
        ),
        previous=[
            PreviousVersion(version=ref.version, path=ref.where if shows_paths else None)
            for ref in adapter.previous
        ],
    )


def _demand_info(deps: ServerDeps) -> DemandInfo:
    measured = deps.metrics.demand.measured()
    return DemandInfo(
        seconds=round(measured.seconds, 3),
        base_requests=measured.num_asked_of_base,
        prompt_tokens=measured.prompt_tokens,
        output_tokens=measured.output_tokens,
        data=[
            AdapterDemandInfo(
                name=each.name, rank=each.spec.max_rank, requests=measured.num_asked.get(each.name, 0)
            )
            for each in deps.adapters.served()
        ],
        engine=_engine_info(deps.engine_costs()),
    )


def _engine_info(costs: str | None) -> EngineInfo | None:
    """Return what the profile in JSON that an engine reports is about."""
    return None if costs is None else decode_json(costs, _Costs).subject


class _Costs(msgspec.Struct, frozen=True):
    subject: EngineInfo


def _canary_info(
    deps: ServerDeps,
    canary: ServedCanary | None,
    by_version: Mapping[str, AdapterStats],
    access: Access,
    *,
    num_requests: int | None,
    shows_paths: bool,
) -> CanaryInfo | None:
    if canary is None:
        return None
    spec, stats = canary.adapter.spec, _stats_of(canary.version, by_version)
    return CanaryInfo(
        version=canary.version,
        share=canary.share,
        path=str(spec.path) if shows_paths else None,
        rank=spec.max_rank,
        bytes=_num_bytes(deps, stats, access),
        tier=stats.tier,
        requests=num_requests,
    )


def _num_bytes(deps: ServerDeps, stats: AdapterStats, access: Access) -> int:
    """Return the memory that a version takes. A sum over replicas would show how many of them have it, so
    who is no operator sees what one copy takes."""
    if deps.fleet is None or access.is_operator or not stats.num_bytes:
        return stats.num_bytes
    return deps.fleet.num_bytes(stats.version)


def _stats_of(version: str, by_version: Mapping[str, AdapterStats]) -> AdapterStats:
    """Return the stats of a version; tier "disk" if the engine, just restarted, does not know it yet."""
    unknown = AdapterStats(version=version, tier="disk", num_bytes=0, in_flight=0, loads=0)
    return by_version.get(version, unknown)
