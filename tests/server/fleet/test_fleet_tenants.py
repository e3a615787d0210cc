"""Tenants of a fleet: what its routes tell them of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def fleet_api(make_api: Callable[..., Api], folder: Path, *replicas: FakeReplica) -> Iterator[Api]:
    setup = FleetSetup(
        make=lambda number: replicas[number],
        limits=lambda info: Limits(max_running=8, kv_tokens=1000),
        policy=Policy.of("most-idle", "auto"),
        costs=costs(),
        no_restart="there is none",
    )
    fleet = FleetEngine(setup, len(replicas))
    api = make_api(tenants=tenants_file(folder), names=NAMES, fleet=fleet)
    try:
        api.run(fleet.start())
        for spec in api.served.engine.adapters.values():
            api.run(fleet.add_adapter(spec))
        yield api
    finally:
        api.run(fleet.close())


def test_no_answer_about_a_fleet_names_anything_of_another_tenant(
    make_api: Callable[..., Api], tmp_path: Path
) -> None:
    with fleet_api(make_api, tmp_path, FakeReplica(), FakeReplica()) as api:
        shown = api.get("/v1/fleet/placement", headers=as_tenant("ops"))
        assert "globex-secret" in shown.text, "there is something to hide"
        answers = Reader(api, "acme", tmp_path).ask_all(lambda path: path.startswith(PATHS))
        check_answers(answers)
        asked = {
            (answer.request.method, answer.request.url.path): answer.status_code for _, answer in answers
        }
        of_fleet = {status for (_, path), status in asked.items() if path.startswith("/v1/fleet")}
        assert of_fleet == {403, 405}, asked


def test_the_size_of_an_adapter_does_not_show_a_tenant_how_many_replicas_have_it(
    make_api: Callable[..., Api], tmp_path: Path
) -> None:
    replicas = [FakeReplica() for _ in range(3)]
    with fleet_api(make_api, tmp_path, *replicas) as api:
        fleet, version = api.served.deps.fleet, api.served.service.version_of("acme-chat")
        assert isinstance(fleet, FleetEngine)
        assert version is not None
        api.served.deps.text.engine = fleet

        def bytes_for(tenant: str) -> int:
            found = api.get("/v1/adapters", headers=as_tenant(tenant)).json()["data"]
            return next(int(each["bytes"]) for each in found if each["name"] == "acme-chat")

        sizes = []
        for replica in replicas:
            replica.held.add(version)
            sizes.append((bytes_for("acme"), bytes_for("ops")))
        one_copy = fleet.num_bytes(version)
        assert sizes == [(one_copy, 64), (one_copy, 128), (one_copy, 192)]
