"""The engine behind a server: a process, a fleet of them here or on Ray, or servers elsewhere."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.adapters.registry import AdapterRegistry
from loraplex.core.shape import ModelShape
from loraplex.server.engine_status import Fleet
from loraplex.server.options import ServeOptions
from loraplex.server.sole_engine import SoleEngine
from loraplex.server.supervised_engine import ServingEngine

if TYPE_CHECKING:
    from loraplex.fleet.policy import Policy
    from loraplex.server.fleet.decision_log import DecisionLog
    from loraplex.server.fleet.fleet_engine import FleetEngine
    from loraplex.server.fleet.ray_cluster import RayPlace


async def chosen_engine(
    options: ServeOptions,
    shape: ModelShape,
    base_model: str,
    state_dir: Path,
    registry: AdapterRegistry,
    stack: AsyncExitStack,
) -> tuple[ServingEngine, Fleet | None]:
    """Return the engine, not started yet: one engine process, a fleet of them, or servers elsewhere."""
    if options.backends is None and options.ray is None and options.num_replicas == 1:
        return SoleEngine(options.engine, factory=options.engine_factory), None
    # Not needed by a single server.
    from loraplex.fleet.policy import Policy
    from loraplex.server.fleet.decision_log import DecisionLog

    log, policy = DecisionLog(state_dir), Policy.of_name(options.policy)
    if options.backends is not None:
        from loraplex.server.fleet.backend_replicas import backend_fleet

        names = (options.engine.model.rstrip("/"), base_model)
        behind = backend_fleet(
            options.backends,
            base_names=names,
            shape=shape,
            policy=policy,
            period_s=options.period_s,
            log=log,
            is_registered=registry.has_version,
        )
        return behind, behind
    if options.ray is not None:
        placed = await _ray_fleet(options, options.ray, shape, policy, log, stack)
        return placed, placed
    from loraplex.server.fleet.local_replicas import local_fleet

    fleet = local_fleet(
        options.engine,
        shape,
        num_replicas=options.num_replicas,
        policy=policy,
        period_s=options.period_s,
        factory=options.engine_factory,
        log=log,
    )
    return fleet, fleet


async def _ray_fleet(
    options: ServeOptions,
    place: RayPlace,
    shape: ModelShape,
    policy: Policy,
    log: DecisionLog,
    stack: AsyncExitStack,
) -> FleetEngine:
    from loraplex.server.fleet.ray_cluster import RayCluster
    from loraplex.server.fleet.ray_replicas import ray_fleet

    cluster = await RayCluster.connect(place)
    stack.push_async_callback(cluster.close)
    return ray_fleet(
        options.engine,
        shape,
        cluster=cluster,
        about=await cluster.about(),
        num_replicas=options.num_replicas,
        policy=policy,
        period_s=options.period_s,
        factory=options.engine_factory,
        log=log,
    )
