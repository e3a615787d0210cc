"""Replicas on a Ray cluster: each has its own actor, which reserves its GPUs or cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from loraplex.core.shape import ModelShape
from loraplex.engine.options import EngineOptions
from loraplex.fleet.live_policy import check_live_policy
from loraplex.fleet.policy import Policy
from loraplex.fleet.replanner import PERIOD_S
from loraplex.server.engine_client import EngineClient
from loraplex.server.fleet.decision_log import DecisionLog
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup, limits_of
from loraplex.server.fleet.guessed_costs import guessed_costs
from loraplex.server.fleet.local_replicas import process_name
from loraplex.server.fleet.ray_child import RayChild
from loraplex.server.fleet.ray_cluster import RayCluster
from loraplex.server.fleet.ray_messages import Connected
from loraplex.server.fleet.ray_shares import share_of
from loraplex.server.pool.directory import PoolDirectory
from loraplex.server.protocol_ipc import Event

_NEW_WAIT_S: Final = 5.0
"""Seconds that a place for a new replica may take to become free."""
_AGAIN_WAIT_S: Final = 600.0
"""The same for a restarted replica: its node, or Ray's head, may be coming back."""


def ray_fleet(
    engine: EngineOptions,
    shape: ModelShape,
    *,
    cluster: RayCluster,
    about: Connected,
    num_replicas: int,
    policy: Policy,
    period_s: float = PERIOD_S,
    factory: str,
    log: DecisionLog | None = None,
) -> FleetEngine:
    """Return a fleet of engine processes on a cluster, not started yet.

    Raises UserError for a policy that is not possible, and if there are too few GPUs or cores.
    """
    engine, resources = share_of(engine, about, num_replicas)
    check_live_policy(policy, shares_memory="GPU" in resources)
    engine = replace(engine, model=_absolute(engine.model))

    pool = PoolDirectory()

    def make(number: int) -> EngineClient:
        waits_s = iter((_NEW_WAIT_S,))

        def start_child(on_event: Callable[[Event], None]) -> RayChild:
            return RayChild(
                cluster,
                number,
                factory=factory,
                config=engine,
                resources=resources,
                wait_s=next(waits_s, _AGAIN_WAIT_S),
                on_event=on_event,
            )

        return EngineClient(
            engine,
            factory=factory,
            start_child=start_child,
            pool=pool.member(number),
            name=process_name(number),
        )

    setup = FleetSetup(
        make=make,
        limits=limits_of(engine),
        policy=policy,
        period_s=period_s,
        costs=guessed_costs(shape, engine.device, engine.num_threads),
    )
    return FleetEngine(setup, num_replicas, log)


def _absolute(model: str) -> str:
    """Return a folder's full path: processes of the cluster have other current directories. Return a
    repository unchanged."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model
