"""The OpenAPI document of a fleet against its server: whatever is sent, its routes behave as documented."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from engine_fleets import costs
from fake_replicas import FakeReplica
from openapi_calls import call_many
from schemathesis import GenerationMode
from server_fixtures import Served, make_server, stored
from starlette.types import Receive, Scope, Send

from loraplex.fleet.policy import Policy
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.routing_events import Limits
from loraplex.server.web_guard import WebAccess

NUM_REPLICAS = 2
BODIES = [
    *(("POST", f"/v1/fleet/{change}") for change in ("drain", "undrain", "restart", "scale")),
    ("PUT", "/v1/fleet/placement"),
]
READS = [
    "/v1/fleet",
    "/v1/fleet/placement",
    "/v1/adapters",
    "/v1/overview",
    "/v1/demand",
    "/health",
    "/metrics",
]
CALLS_PER_BODY = 16
MANY_CALLS = 2_000
MODES = list(GenerationMode)


class FleetApp:
    """A server of a fleet with tenants, called by an operator. It starts anew for each client, in the event
    loop of that."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_starts = 0
        self._fleet, self._served = self._make()

    def _make(self) -> tuple[FleetEngine, Served]:
        setup = FleetSetup(
            make=lambda number: FakeReplica(),
            limits=lambda info: Limits(max_running=8, kv_tokens=1000),
            policy=Policy.of("most-idle", "auto"),
            costs=costs(),
            most=(2 * NUM_REPLICAS, "there are no more here"),
        )
        fleet = FleetEngine(setup, NUM_REPLICAS)
        tenants = f"[tenants.ops]\nkeys = [{stored('key')}]\noperator = true"
        web = WebAccess(allowed_hosts=("testserver",))
        self._num_starts += 1
        folder = self._folder / str(self._num_starts)
        return fleet, make_server(folder, web=web, tenants=tenants, fleet=fleet)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        others = [header for header in scope["headers"] if header[0] != b"authorization"]
        headers = [*others, (b"authorization", b"Bearer key")]
        await self._served.app({**scope, "client": ("127.0.0.1", 1), "headers": headers}, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self.close()
        self._fleet, self._served = self._make()
        await self._fleet.start()
        for spec in self._served.engine.adapters.values():
            await self._fleet.add_adapter(spec)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._fleet.close()
        await send({"type": "lifespan.shutdown.complete"})

    def close(self) -> None:
        self._served.service.registry.close()


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    app = FleetApp(tmp_path_factory.mktemp("fleet"))
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    app.close()


class Operators:
    """Gives most bodies numbers of replicas and names of adapters that there are."""

    def __init__(self) -> None:
        self._num_bodies = 0

    def __call__(self, body: dict[str, Any]) -> None:
        self._num_bodies += 1
        if self._num_bodies % 3 == 0:
            return
        number = self._num_bodies % NUM_REPLICAS
        if "replica" in body:
            body["replica"] = number
        if isinstance(body.get("replicas"), int):
            body["replicas"] = 1 + number
        if "adapters" in body:
            body["replicas"] = list(range(NUM_REPLICAS))
            body["adapters"] = [{"lora_name": name, "replicas": [number]} for name in ("pirate", "poet")]


def check_bodies(schema: Any, method: str, path: str, mode: GenerationMode, num_calls: int) -> None:
    statuses = call_many(schema[path][method], mode, num_calls, Operators())
    assert sum(statuses.values()) >= num_calls
    if mode is GenerationMode.NEGATIVE:
        assert 200 not in statuses
    else:
        assert statuses[200] > num_calls // 4, statuses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("method", "path"), BODIES)
def test_any_body_is_answered_as_documented(
    schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    check_bodies(schema, method, path, mode, CALLS_PER_BODY)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("method", "path"), BODIES)
def test_thousands_of_bodies_are_answered_as_documented(
    schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    check_bodies(schema, method, path, mode, ceil(MANY_CALLS / (len(BODIES) * len(MODES))))


@pytest.mark.parametrize("path", READS)
def test_every_page_is_as_documented(schema: Any, path: str) -> None:
    assert set(call_many(schema[path]["GET"], GenerationMode.POSITIVE, 2)) == {200}


def test_a_placement_is_released_as_documented(schema: Any) -> None:
    assert set(call_many(schema["/v1/fleet/placement"]["DELETE"], GenerationMode.POSITIVE, 2)) == {200}


def test_every_operation_on_the_fleet_is_covered(schema: Any) -> None:
    documented = {operation.ok().label for operation in schema.get_all_operations()}
    of_fleet = {label for label in documented if "/v1/fleet" in label}
    reads = (("GET", path) for path in READS if path.startswith("/v1/fleet"))
    covered = [*BODIES, *reads, ("DELETE", "/v1/fleet/placement")]
    assert of_fleet == {f"{method} {path}" for method, path in covered}
