"""Routes of the web page: its files, and a server at a glance."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final
from uuid import uuid4
from zlib import crc32

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

import loraplex
from loraplex.core.stats import EngineStats
from loraplex.server.auth import Administrators
from loraplex.server.body import read_query
from loraplex.server.deps import ServerDeps
from loraplex.server.engine_status import Fleet
from loraplex.server.fleet_routes import left_out_infos, replica_infos
from loraplex.server.model_routes import json_response, visible_adapters
from loraplex.server.openapi import operation
from loraplex.server.page.adapter_changes import AdapterChanges
from loraplex.server.page.files import page_files, page_response
from loraplex.server.requests import OverviewQuery
from loraplex.server.responses import AdapterMap, EngineFigures, Overview, TwinPicture
from loraplex.server.served_adapter import ServedAdapter
from loraplex.server.tenants.access import access_of

_MAX_LEFT_OUT: Final = 20
_LETTERS: Final = {"device": "d", "loading": "l", "host": "h", "disk": "-"}


def page_router(deps: ServerDeps) -> APIRouter:
    router = APIRouter()
    changes = AdapterChanges()
    looking = asyncio.Lock()
    process = uuid4().hex[:8]

    async def look(stats: EngineStats) -> None:
        """Look for changes at most once a second, however many pages ask, in a thread: thousands of adapters
        are compared."""
        async with looking:
            now_s = deps.metrics.clock.now_s()
            if changes.is_due(now_s):
                holders = None if deps.fleet is None else deps.fleet.holders
                await asyncio.to_thread(changes.look, deps.adapters.served(), stats, holders, now_s)

    async def page(request: Request) -> Response:
        return page_response(request.scope)

    for path in page_files():
        router.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)

    @router.get(
        "/v1/overview",
        **operation(
            summary="The server at a glance, for its page",
            query=OverviewQuery,
            answer=Overview,
            errors=(401, 503),
        ),
    )
    async def overview(request: Request) -> Response:
        query = read_query(request, OverviewQuery)
        access = access_of(request.scope)
        stats = await deps.text.engine.stats()
        await look(stats)
        now_s = deps.metrics.clock.now_s()
        deps.history.sample()
        fleet = deps.fleet if access.is_operator else None
        # In a thread: streams continue while thousands of adapters are looked up.
        tiers, drawn = await asyncio.to_thread(_map, visible_adapters(deps, access), stats, fleet)
        status = deps.engine_status()
        answer = Overview(
            model=deps.adapters.base_model,
            version=loraplex.__version__,
            process=process,
            now_s=round(now_s, 3),
            state=status.state.value,
            message=status.explain(),
            max_model_len=deps.text.max_model_len,
            has_chat=deps.text.tokenizer.has_chat_template,
            uses_base=access.uses_base,
            may_change=_may_change(deps, request.scope),
            has_admin_key=bool(deps.admin_keys) or deps.tenants is not None,
            num_adapters=len(drawn.tiers),
            tiers=tiers,
            engine=_figures(stats) if access.reads_metrics else None,
            map=None if drawn.etag == query.map else drawn,
            samples=deps.history.after(query.samples_after) if access.reads_metrics else [],
            changes=[each for each in changes.after(query.changes_after) if access.sees(each.name)],
            left_out=left_out_infos(deps.adapters)[:_MAX_LEFT_OUT] if access.is_operator else [],
            replicas=None if fleet is None else replica_infos(fleet),
            num_plans=fleet.num_plans if fleet is not None and fleet.has_placement else None,
            twin=_twin(deps) if access.reads_metrics else None,
        )
        return json_response(answer)

    return router


def _may_change(deps: ServerDeps, scope: Scope) -> bool:
    if deps.tenants is not None:
        return access_of(scope).is_administrator
    return Administrators(deps.admin_keys).include(scope)


def _map(
    adapters: Sequence[ServedAdapter], stats: EngineStats, fleet: Fleet | None
) -> tuple[dict[str, int], AdapterMap]:
    """Return the number of adapters by tier, and where each of them is."""
    by_version = {each.version: each.tier for each in stats.adapters}
    tiers = [by_version.get(each.version, "disk") for each in adapters]
    letters = "".join(map(_LETTERS.__getitem__, tiers))
    held = None if fleet is None else _held(adapters, tiers, fleet)
    names = ",".join(each.name for each in adapters)
    etag = f"{crc32(f'{names} {letters} {held}'.encode()):08x}"
    return dict(Counter(tiers)), AdapterMap(etag=etag, tiers=letters, held=held)


def _held(adapters: Sequence[ServedAdapter], tiers: Sequence[str], fleet: Fleet) -> list[list[int]]:
    positions: dict[int, list[int]] = {each.number: [] for each in fleet.replicas}
    for position, (adapter, tier) in enumerate(zip(adapters, tiers, strict=True)):
        for replica in fleet.holders(adapter.version) if tier != "disk" else ():
            if replica in positions:
                positions[replica].append(position)
    return list(positions.values())


def _figures(stats: EngineStats) -> EngineFigures:
    return EngineFigures(
        kv_blocks=stats.num_kv_blocks,
        kv_blocks_used=stats.num_kv_blocks_used,
        host_adapter_bytes=stats.host_adapter_bytes,
        host_adapter_budget_bytes=stats.host_adapter_budget_bytes,
        device_adapter_bytes=stats.device_adapter_bytes,
        device_arena_bytes=stats.device_arena_bytes,
    )


def _twin(deps: ServerDeps) -> TwinPicture | None:
    if deps.shadow_twin is None:
        return None
    figures = deps.shadow_twin.figures
    latest = figures.latest
    return TwinPicture(
        is_measured=figures.is_measured,
        num_requests=0 if latest is None else latest.num_requests,
        measured=None if latest is None else latest.measured,
        predicted=None if latest is None else latest.predicted,
    )
