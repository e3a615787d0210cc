"""Fleets of real engine processes around the fake core, for tests to drive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from engine_client_harness import client_of
from fake_core import FakeOptions

from loraplex.core.request import EngineRequest
from loraplex.fleet.policy import Policy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.server.engine_client import EngineClient
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.routing_events import Limits
from loraplex.server.restart_policy import RestartPolicy


def costs() -> CostModel:
    found = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(found, CostModel)
    return found


class Replicas:
    """Makes the replicas of a fleet, and remembers the latest of each number."""

    def __init__(self, *configs: FakeOptions | None, restart: RestartPolicy | None = None) -> None:
        self._configs = configs
        self._options = {} if restart is None else {"restart": restart}
        self.clients: dict[int, EngineClient] = {}

    def make(self, number: int) -> EngineClient:
        config = self._configs[number] if number < len(self._configs) else None
        self.clients[number] = client_of(config, **self._options)
        return self.clients[number]

    def fleet(self, num_replicas: int) -> FleetEngine:
        setup = FleetSetup(
            make=self.make,
            limits=lambda info: Limits(max_running=8, kv_tokens=16 * info.num_kv_blocks),
            policy=Policy.of("round-robin"),
            costs=costs(),
            most=(6, "there are six of everything"),
        )
        return FleetEngine(setup, num_replicas)


@asynccontextmanager
async def fleet_of(
    num_replicas: int = 3, *, restart: RestartPolicy | None = None
) -> AsyncIterator[tuple[FleetEngine, dict[int, EngineClient]]]:
    replicas = Replicas(restart=restart)
    fleet = replicas.fleet(num_replicas)
    await fleet.start()
    try:
        yield fleet, replicas.clients
    finally:
        await fleet.close()


async def tokens(fleet: FleetEngine, request: EngineRequest) -> tuple[int, ...]:
    return tuple([token async for output in fleet.generate(request) for token in output.token_ids])
