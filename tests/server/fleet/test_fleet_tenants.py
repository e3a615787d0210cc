"""Tenants of a fleet: what its routes tell them of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_fleets import costs
from fake_replicas import FakeReplica
from server_fixtures import Api
from tenant_reader import NAMES, Reader, as_tenant, check_answers, tenants_file

from loraplex.fleet.policy import Policy
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.routing_events import Limits

PATHS = ("/v1/fleet", "/v1/adapters", "/metrics", "/health")


def test_no_answer_about_a_fleet_names_anything_of_another_tenant(
    make_api: Callable[..., Api], tmp_path: Path
) -> None:
    setup = FleetSetup(
        make=lambda number: FakeReplica(),
        limits=lambda info: Limits(max_running=8, kv_tokens=1000),
        policy=Policy.of("most-idle", "auto"),
        costs=costs(),
        no_restart="there is none",
    )
    fleet = FleetEngine(setup, 2)
    api = make_api(tenants=tenants_file(tmp_path), names=NAMES, fleet=fleet)
    try:
        api.run(fleet.start())
        for spec in api.served.engine.adapters.values():
            api.run(fleet.add_adapter(spec))
        shown = api.get("/v1/fleet/placement", headers=as_tenant("ops"))
        assert "globex-secret" in shown.text, "there is something to hide"
        answers = Reader(api, "acme", tmp_path).ask_all(lambda path: path.startswith(PATHS))
        check_answers(answers)
        asked = {
            (answer.request.method, answer.request.url.path): answer.status_code for _, answer in answers
        }
        of_fleet = {status for (_, path), status in asked.items() if path.startswith("/v1/fleet")}
        assert of_fleet == {403, 405}, asked
    finally:
        api.run(fleet.close())
