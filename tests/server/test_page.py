"""The files of the web page, and the answers that it is made of."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from page_servers import page_server
from server_fixtures import USER, Api
from serving_fakes import make_spec

from loraplex.core.clock import ManualClock
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.server.app import create_app
from loraplex.server.health import FrontApp
from loraplex.server.page.adapter_changes import AdapterChanges
from loraplex.server.page.files import page_files
from loraplex.server.served_adapter import ServedAdapter
from loraplex.server.tenants.keys import StoredKey
from loraplex.server.tenants.tenants import Tenants
from loraplex.server.tenants.tenants_file import parse_tenants
from loraplex.server.web_guard import WebAccess

TENANTS = f"""
[tenants.bards]
keys = ["{StoredKey.of("of-bards").text}"]
adapters = ["poet"]
base_model = false

[tenants.operators]
keys = ["{StoredKey.of("of-operators").text}"]
operator = true
"""
ApiFactory = Callable[..., Api]


def test_files_are_served_with_a_policy_that_lets_nothing_foreign_in(api: Api) -> None:
    for path in page_files():
        response = api.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        again = api.get(path, headers={"if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert api.get("/").headers["content-type"].startswith("text/html")
    assert api.request("HEAD", "/").status_code == 200
    assert api.get("/page/index.html").status_code == 404
    assert api.get("/page/../routes.py").status_code == 404


def test_files_name_no_other_host_and_only_files_that_exist() -> None:
    files = page_files()
    for path, file in files.items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|@import|innerHTML|eval\(", text), path
        for name in re.findall(r'(?:href|src)="(page/[^"]+)"', text):
            assert f"/{name}" in files
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert f"/page/{name}" in files


def test_no_other_page_of_the_server_runs_scripts_from_elsewhere(api: Api) -> None:
    for path in ("/docs", "/docs/oauth2-redirect", "/redoc"):
        assert api.get(path).status_code == 404, path
    described = api.get("/openapi.json").json()["paths"]
    pages = []
    for path in ("/openapi.json", "/", *described):
        answer = api.get(path)
        if "html" in answer.headers.get("content-type", ""):
            pages.append(path)
            assert not re.search(r"https?:|//[a-z]+\.", answer.text), path
    assert pages == ["/"]


def test_the_page_needs_no_key_but_what_it_shows_does(make_api: ApiFactory) -> None:
    api = make_api(api_keys=("secret",))
    assert all(api.get(path).status_code == 200 for path in page_files())
    assert api.get("/v1/overview").status_code == 401
    assert api.get("/v1/overview", headers={"authorization": "Bearer secret"}).status_code == 200


def test_the_page_is_there_while_the_server_starts() -> None:
    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(FrontApp(web=WebAccess(), clock=ManualClock()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path)

    assert asyncio.run(get("/")).status_code == 200
    assert asyncio.run(get("/v1/overview")).json()["status"] == "starting"


def test_an_overview_says_where_adapters_are(tmp_path: Path) -> None:
    clock = ManualClock()
    served, engine = page_server(tmp_path, clock=clock)
    api = Api(served)
    first = api.get("/v1/overview").json()
    assert first["map"]["tiers"] == "--"
    assert first["tiers"] == {"disk": 2}
    same = api.get("/v1/overview", params={"map": first["map"]["etag"]}).json()
    assert same["map"] is None
    assert same["changes"] == []
    engine.move("version-of-poet", "device", num_loads=1)
    soon = api.get("/v1/overview").json()
    assert (soon["map"]["tiers"], soon["changes"]) == ("-d", []), "changes are looked for once a second"
    clock.advance(1.0)
    moved = api.get("/v1/overview", params={"map": first["map"]["etag"]}).json()
    [change] = moved["changes"]
    assert (change["name"], change["kind"], change["tier"]) == ("poet", "loaded", "device")
    after = api.get("/v1/overview", params={"changes_after": change["at_s"]}).json()
    assert after["changes"] == []
    api.close()


def test_a_tenant_sees_only_its_own_adapters_and_no_figures_of_the_server(tmp_path: Path) -> None:
    clock = ManualClock()
    served, engine = page_server(tmp_path, clock=clock)
    tenants = Tenants(parse_tenants(TENANTS, Path("tenants.toml")), ManualClock())
    api = Api(replace(served, app=create_app(replace(served.deps, tenants=tenants))))
    own, all_of_it = ({"authorization": f"Bearer {key}"} for key in ("of-bards", "of-operators"))
    for name in ("pirate", "poet"):
        api.get("/v1/overview", headers=own)
        engine.move(f"version-of-{name}", "device", num_loads=1)
        clock.advance(1.0)
    overview = api.get("/v1/overview", headers=own).json()
    assert overview["map"]["tiers"] == "d"
    assert {each["name"] for each in overview["changes"]} == {"poet"}
    assert (overview["samples"], overview["engine"], overview["left_out"]) == ([], None, [])
    assert not overview["uses_base"]
    assert not overview["may_change"]
    adapters = api.get("/v1/adapters", headers=own, params={"order": "loads"}).json()
    assert [each["name"] for each in adapters["data"]] == ["poet"]
    assert adapters["total"] == 1
    assert "pirate" not in str([overview, adapters])
    assert api.get("/v1/overview", headers=all_of_it).json()["map"]["tiers"] == "dd"
    assert all(api.get(path).status_code == 200 for path in page_files())
    api.close()


def test_a_list_of_adapters_is_filtered_ordered_and_paged(tmp_path: Path) -> None:
    served, engine = page_server(tmp_path, num_more=30)
    api = Api(served)
    api.post("/v1/chat/completions", {"model": "tenant-0007", "messages": USER, "max_tokens": 5})
    engine.move("version-0003", "host")

    def names(**query: object) -> list[str]:
        answer = api.get("/v1/adapters", params=query).json()
        return [answer["total"], *(each["name"] for each in answer["data"])]

    assert len(names()) == 33
    assert names(contains="TENANT-001", offset=8, limit=5) == [10, "tenant-0018", "tenant-0019"]
    assert names(tier="host") == [1, "tenant-0003"]
    assert names(order="requests", limit=2) == [32, "tenant-0007", "pirate"]
    assert names(offset=10**6, limit=1) == [32]
    for wrong in ({"limit": 0}, {"limit": "all"}, {"tier": "moon"}, {"order": "size"}, {"offset": -1}):
        refused = api.get("/v1/adapters", params=wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == next(iter(wrong))
    api.close()


def test_history_has_rates_and_latencies_of_the_seconds_before(make_api: ApiFactory) -> None:
    clock = ManualClock()
    api = make_api(clock=clock)
    metrics, history = api.served.deps.metrics, api.served.deps.history
    history.sample()
    assert history.after(0.0) == []  # it has just begun
    for second in range(1, 9):
        clock.advance(1.0)
        metrics.num_generation_tokens += 30
        if second == 4:
            metrics.ttft.observe(0.2)
        history.sample()
        history.sample()  # of another page, at the same time
    samples = history.after(0.0)
    assert [each.at_s for each in samples] == [float(second) for second in range(1, 9)]
    assert {each.tokens_per_s for each in samples} == {30.0}
    assert [each.ttft_s for each in samples] == [None] * 3 + [0.2] * 5
    assert [each.ttft_p95_s for each in samples] == [None] * 3 + [0.2] * 5, "no higher than the only one"
    for ttft_s in [0.11] * 99 + [0.249]:
        metrics.ttft.observe(ttft_s)
    clock.advance(1.0)
    history.sample()
    high_s = history.after(8.0)[0].ttft_p95_s
    assert high_s is not None
    assert 0.11 < high_s < 0.249, "interpolated within its bucket"
    assert [each.at_s for each in history.after(6.0)] == [7.0, 8.0, 9.0]


def test_requests_in_flight_are_counted_by_whether_they_have_a_token(make_api: ApiFactory) -> None:
    api = make_api()
    api.post("/v1/chat/completions", {"model": "pirate", "messages": USER})
    api.post("/v1/chat/completions", {"model": "nobody", "messages": USER})
    assert api.served.deps.metrics.num_generating == 0


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (("disk", 0), ("host", 1), [("loaded", "host")]),
        (("disk", 0), ("loading", 0), []),
        (("loading", 0), ("device", 1), [("loaded", "device")]),
        (("loading", 0), ("host", 1), [("loaded", "host")]),
        (("loading", 0), ("host", 0), []),
        (("device", 1), ("host", 1), [("evicted", "host")]),
        (("device", 1), ("disk", 1), [("evicted", "disk")]),
        (("device", 1), ("device", 1), []),
        (("device", 1), ("device", 2), [("loaded", None)]),
        (("disk", 1), ("disk", 2), [("loaded", None), ("evicted", "disk")]),
        (("device", 1), ("disk", 2), [("loaded", None), ("evicted", "disk")]),
    ],
)
def test_moves_of_weights_are_read_off_tiers_and_counts(
    before: tuple[str, int], now: tuple[str, int], expected: list[tuple[str, str | None]]
) -> None:
    changes = AdapterChanges()
    adapters = [ServedAdapter(name="one", spec=make_spec("version"))]
    for at_s, (tier, loads) in enumerate((before, now)):
        seen = AdapterStats(version="version", tier=tier, num_bytes=1, in_flight=0, loads=loads)
        changes.look(adapters, EngineStats(adapters=(seen,)), None, float(at_s))
    assert [(each.kind, each.tier) for each in changes.after(0.0)] == expected


def test_changes_of_names_and_replicas_are_recorded() -> None:
    changes = AdapterChanges()
    seen = AdapterStats(version="a", tier="host", num_bytes=1, in_flight=0, loads=1)
    stats, holders = EngineStats(adapters=(seen,)), {"a": [0, 1]}

    def look(at_s: float, **names: str) -> list[tuple[str, str, int | None]]:
        adapters = [ServedAdapter(name=name, spec=make_spec(version)) for name, version in names.items()]
        changes.look(adapters, stats, holders.__getitem__, at_s)
        return [(each.name, each.kind, each.replica) for each in changes.after(at_s - 0.5)]

    assert look(0.0, one="a") == []
    holders["a"] = [1, 2]
    assert look(1.0, one="a", two="a") == [
        ("two", "added", None),
        ("one", "loaded", 2),
        ("one", "evicted", 0),
        ("two", "loaded", 2),
        ("two", "evicted", 0),
    ]
    assert look(2.0, one="b") == [("one", "switched", None), ("two", "removed", None)]
    holders["a"] = []
    assert look(60.0, three="a") == []  # nobody has looked for a minute: the time is not known
