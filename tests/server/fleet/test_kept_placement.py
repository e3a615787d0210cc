"""A front that ends and starts again on its state folder, and the plan that its fleet was given."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_fleets import costs
from fake_replicas import FakeReplica
from fastapi import FastAPI
from replicas import run, until
from server_fixtures import SHAPE
from serving_fakes import make_spec

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.registry import AdapterRegistry
from loraplex.cli.applied_plan import plan_lines
from loraplex.core.clock import ManualClock
from loraplex.fleet.policy import Policy
from loraplex.server.adapter_service import AdapterService
from loraplex.server.auth import Administrators
from loraplex.server.body import BodyLimits, BodyReader
from loraplex.server.errors import install_error_handlers
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.kept_placement import FOLDER, PlacementFile
from loraplex.server.fleet.routing_events import Limits
from loraplex.server.fleet_routes import fleet_router
from loraplex.server.request_log import RequestLogMiddleware
from loraplex.server.served_adapter import ServedAdapter

RANKS = {"one": 8, "two": 8, "three": 4}
PATH = "/v1/fleet/placement"
GIVEN = [
    {"lora_name": "one", "rank": 8, "replicas": [1]},
    {"lora_name": "two", "replicas": [0, 1], "shares": [0.25, 0.75]},
]
BODY = {"replicas": [0, 1], "adapters": GIVEN, "plan": "week.json, packed by hand"}


@asynccontextmanager
async def front(
    state: Path, *, num_replicas: int = 2, placement: str = "auto", ranks: dict[str, int] | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, FleetEngine]]:
    """A server of a fleet on this state folder, which ends without a word."""
    setup = FleetSetup(
        make=lambda number: FakeReplica(),
        limits=lambda info: Limits(max_running=8, kv_tokens=1000),
        policy=Policy.of("most-idle", placement),
        costs=costs(),
        no_restart="there is none",
    )
    fleet = FleetEngine(setup, num_replicas)
    registry = AdapterRegistry(state, "tiny@shape")
    service = AdapterService(
        base_model="tiny", engine=fleet, registry=registry, shape=SHAPE, allowed=AllowedPaths([])
    )
    await fleet.start()
    for name, rank in (RANKS if ranks is None else ranks).items():
        await service.adopt(ServedAdapter(name=name, spec=make_spec(f"version-of-{name}", rank=rank)))
    app = FastAPI()
    file = PlacementFile(state, "tiny@shape")
    bodies = BodyReader(BodyLimits())
    app.include_router(fleet_router(fleet, service, Administrators(()), bodies, ManualClock(), file))
    install_error_handlers(app)
    try:
        transport = httpx.ASGITransport(
            RequestLogMiddleware(app, clock=ManualClock()), client=("127.0.0.1", 1)
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client, fleet
    finally:
        await fleet.close()
        await service.close()
        registry.close()


async def placed(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(PATH)).json()
    return found


async def plan_of(client: httpx.AsyncClient) -> dict[str, Any] | None:
    found: dict[str, Any] | None = (await client.get("/v1/fleet")).json()["plan"]
    return found


def test_a_plan_is_in_force_again_after_a_restart_until_it_is_released(tmp_path: Path) -> None:
    async def scenario() -> None:
        before_s = time.time()
        async with front(tmp_path) as (client, _):
            assert await plan_of(client) is None
            dry = await client.put(PATH, json=BODY | {"dry_run": True})
            assert (dry.status_code, dry.json()["is_given"]) == (200, False)
            assert not (tmp_path / FOLDER).exists()
            assert (await client.put(PATH, json=BODY)).status_code == 200
            first = await plan_of(client)
            assert first is not None
            assert first["name"] == BODY["plan"]
            assert before_s <= first["since_s"] <= time.time()
            assert (await client.put(PATH, json=BODY)).status_code == 200
        async with front(tmp_path) as (client, fleet):
            assert fleet.placed_on("version-of-one") is not None
            found = await placed(client)
            assert found["is_given"]
            assert {row["name"]: row["given"] for row in found["data"]} == {
                "one": [1],
                "three": None,
                "two": [0, 1],
            }
            again = await plan_of(client)
            assert again is not None
            assert again["since_s"] == first["since_s"]
            entry = fleet.placed_on("version-of-two")
            await until(lambda: fleet.waiting("version-of-two") == [])
            entry = fleet.placed_on("version-of-two")
            assert entry is not None
            assert (entry.replicas, entry.shares) == ((0, 1), (0.25, 0.75))
            assert (await client.delete(PATH)).status_code == 200
            assert await plan_of(client) is None
        async with front(tmp_path) as (client, _):
            assert not (await placed(client))["is_given"]

    run(scenario())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_replicas": 3}, "the placement is for replicas 0, 1, and the fleet has replicas 0, 1, 2"),
        ({"ranks": {"other": 8}}, "none of its adapters is served"),
        ({"placement": "everywhere"}, "every replica of this fleet serves every adapter"),
    ],
)
def test_a_plan_that_does_not_fit_any_more_waits_for_a_fleet_that_it_fits(
    tmp_path: Path, options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with front(tmp_path) as (client, _):
            assert (await client.put(PATH, json=BODY)).status_code == 200
        with caplog.at_level(logging.WARNING):
            async with front(tmp_path, **options) as (client, _):
                found = await plan_of(client)
        assert found is not None
        assert words in found["trouble"]
        [line] = [each.getMessage() for each in caplog.records if "by its policy" in each.getMessage()]
        assert "the plan week.json, packed by hand" in line
        assert words in line
        assert "not in force since the fleet was started" in "".join(plan_lines(found))
        async with front(tmp_path) as (client, _):
            assert (await placed(client))["is_given"], "it is kept meanwhile"
        async with front(tmp_path, **options) as (client, _):
            assert (await client.delete(PATH)).status_code == 200
            assert await plan_of(client) is None
        async with front(tmp_path) as (client, _):
            assert await plan_of(client) is None

    run(scenario())


def test_what_of_a_plan_does_not_hold_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with front(tmp_path) as (client, _):
            assert (await client.put(PATH, json=BODY)).status_code == 200
        with caplog.at_level(logging.WARNING):
            async with front(tmp_path, ranks={"one": 16, "three": 4}) as (client, fleet):
                await until(lambda: fleet.waiting("version-of-one") == [])
                fleet.drain(1)
                fleet.place()
                found = await plan_of(client)
        [line] = [each.getMessage() for each in caplog.records if "in force again" in each.getMessage()]
        assert "'one' has rank 16, not 8, 'two' is not served" in line
        assert found is not None
        assert found["missing_replicas"] == [1]
        assert found["not_in_it"] == {"number": 1, "first": ["three"]}
        assert found["not_served"] == {"number": 1, "first": ["two"]}
        assert found["not_there"] == {"number": 1, "first": ["one"]}
        said = "\n".join(plan_lines(found))
        for words in (
            "week.json, packed by hand, 2 adapters, in force since 2",
            "replica 1 of it does not serve",
            "placed by the policy: 1 adapter ('three')",
            "in it, and not served: 1 adapter ('two')",
            "not where it has them yet: 1 adapter ('one')",
        ):
            assert words in said

    run(scenario())


def test_a_plan_that_holds_is_said_to() -> None:
    none = {"number": 0, "first": []}
    plan = {"name": None, "since_s": 1.7e9, "adapters": 1, "trouble": None, "missing_replicas": []}
    lines = list(
        plan_lines(plan | {"new_replicas": [], "not_in_it": none, "not_served": none, "not_there": none})
    )
    assert lines[1:] == ["  all of it holds"]
    assert list(plan_lines(None)) == []


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b'{"loraplex_placement": 1}', b"[" * 100_000])
def test_a_broken_file_is_said_and_a_fleet_starts_without(tmp_path: Path, content: bytes) -> None:
    async def scenario() -> None:
        async with front(tmp_path) as (client, _):
            assert (await client.put(PATH, json=BODY)).status_code == 200
        [path] = (tmp_path / FOLDER).iterdir()
        path.write_bytes(content)
        async with front(tmp_path) as (client, _):
            found = await plan_of(client)
            assert found is not None
            assert "is no placement of a fleet" in found["trouble"]
            assert (await client.put(PATH, json=BODY)).status_code == 200
        async with front(tmp_path) as (client, _):
            assert (await placed(client))["is_given"]

    run(scenario())


def test_a_plan_that_cannot_be_kept_is_not_given(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with front(tmp_path) as (client, _):
            (tmp_path / FOLDER).write_text("a file in its place")
            refused = await client.put(PATH, json=BODY)
            assert refused.json()["error"]["code"] == "storage_failed", refused.text
            assert "cannot be written" in refused.json()["error"]["message"]
            assert not (await placed(client))["is_given"]

    run(scenario())


def test_a_name_for_a_plan_has_no_control_characters(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with front(tmp_path) as (client, _):
            for name in ("\x1b[2J", "\x9b2J", "x" * 201):
                assert (await client.put(PATH, json=BODY | {"plan": name})).status_code == 400

    run(scenario())
