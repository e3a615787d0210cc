"""Routes for the replicas of a fleet: their states, and which of them take requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.clock import Clock
from loraplex.server.adapter_service import AdapterService
from loraplex.server.audit import audited_replicas
from loraplex.server.auth import Administrators
from loraplex.server.body import BodyReader
from loraplex.server.engine_status import Fleet
from loraplex.server.fleet.given_placement import GivenPlacement
from loraplex.server.fleet.kept_placement import PlacementFile
from loraplex.server.model_routes import json_response
from loraplex.server.openapi import operation
from loraplex.server.requests import LeaveRequest, PlacementRequest, ReplicaRequest, ScaleRequest
from loraplex.server.responses import LeftOutInfo, Placement, ReplicaInfo, ReplicaList

_ERRORS: Final = (401, 403, 503)
_PLACEMENT_PATH: Final = "/v1/fleet/placement"
R = TypeVar("R", bound=msgspec.Struct)


def fleet_router(
    fleet: Fleet,
    adapters: AdapterService,
    administrators: Administrators,
    bodies: BodyReader,
    clock: Clock,
    placement_file: PlacementFile | None = None,
) -> APIRouter:
    """Return the routes. `placement_file`: keeps the placement that the fleet is given, and is taken up now;
    None keeps it nowhere."""
    router = APIRouter()
    placement = GivenPlacement(fleet, adapters, placement_file)
    placement.take_up()
    _add_placement(router, placement, administrators, bodies, clock)

    @router.get("/v1/fleet", **operation(summary="List the replicas", answer=ReplicaList, errors=(401, 403)))
    async def replicas(request: Request) -> Response:
        administrators.require_operator(request.scope)
        return json_response(_list(fleet, adapters, placement))

    def add(
        path: str, summary: str, body_type: type[R], change: Callable[[R], Awaitable[None] | None]
    ) -> None:
        @router.post(path, **operation(summary=summary, body=body_type, answer=ReplicaList, errors=_ERRORS))
        async def changed(request: Request) -> Response:
            administrators.require_fleet(request.scope)
            async with bodies.read(request, body_type) as body:
                pass
            asked = msgspec.to_builtins(body)
            with audited_replicas(request.scope, clock, **asked):
                if (changing := change(body)) is not None:
                    await changing
            return json_response(_list(fleet, adapters, placement))

    add(
        "/v1/fleet/drain",
        "Send a replica no more requests",
        LeaveRequest,
        lambda body: fleet.drain(body.replica, move=body.move),
    )
    add(
        "/v1/fleet/undrain",
        "Send a replica requests again",
        ReplicaRequest,
        lambda body: fleet.undrain(body.replica),
    )
    add(
        "/v1/fleet/restart",
        "Replace a replica by a new one, after its requests",
        LeaveRequest,
        lambda body: fleet.restart(body.replica, move=body.move),
    )
    add(
        "/v1/fleet/scale",
        "Have so many replicas; answered when they serve",
        ScaleRequest,
        lambda body: fleet.scale(body.replicas, move=body.move),
    )
    return router


def _add_placement(
    router: APIRouter,
    placement: GivenPlacement,
    administrators: Administrators,
    bodies: BodyReader,
    clock: Clock,
) -> None:
    @router.get(
        _PLACEMENT_PATH,
        **operation(summary="List where adapters are served", answer=Placement, errors=(401, 403, 503)),
    )
    async def placed(request: Request) -> Response:
        administrators.require_operator(request.scope)
        return json_response(placement.state())

    @router.put(
        _PLACEMENT_PATH,
        **operation(
            summary="Serve adapters by these replicas instead of those that the policy chooses",
            body=PlacementRequest,
            answer=Placement,
            errors=_ERRORS,
        ),
    )
    async def give(request: Request) -> Response:
        administrators.require_fleet(request.scope)
        async with bodies.read(request, PlacementRequest) as body:
            with audited_replicas(
                request.scope, clock, adapters=len(body.adapters), dry_run=body.dry_run or None
            ):
                await placement.give(body)
        return json_response(placement.state())

    @router.delete(
        _PLACEMENT_PATH,
        **operation(
            summary="Let the policy place all adapters again", answer=Placement, errors=(400, *_ERRORS)
        ),
    )
    async def release(request: Request) -> Response:
        administrators.require_fleet(request.scope)
        with audited_replicas(request.scope, clock):
            await placement.release()
        return json_response(placement.state())


def _list(fleet: Fleet, adapters: AdapterService, placement: GivenPlacement) -> ReplicaList:
    return ReplicaList(
        left_out=left_out_infos(adapters),
        data=replica_infos(fleet),
        plan=placement.applied(),
    )


def left_out_infos(adapters: AdapterService) -> list[LeftOutInfo]:
    return [LeftOutInfo(name=name, reason=left.reason) for name, left in adapters.left_out.items()]


def replica_infos(fleet: Fleet) -> list[ReplicaInfo]:
    return [
        ReplicaInfo(
            replica=each.number,
            state=each.status.state.value,
            message=each.status.message,
            drained=each.drained,
            in_flight=each.num_in_flight,
            sent=each.num_sent,
            placed=each.num_placed,
            refused=each.num_refused,
            brought=each.num_brought,
            migrated=each.num_migrated,
            restarts=each.status.num_restarts,
            pid=each.status.pid,
            node=each.status.node,
        )
        for each in fleet.replicas
    ]
