"""Adapters that are loaded, listed and unloaded while a server runs."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from adapter_calls import load, unload, version_of
from server_fixtures import SHAPE, USER, Api, write_adapter
from serving_fakes import make_spec, says

from loraplex.adapters.peft_reader import read_adapter
from loraplex.core.errors import StorageError

TEXT = "Hello world! How are you?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is open for loading, with the adapters `one` and `two` in it."""
    write_adapter(tmp_path / "open" / "one", seed=1, rank=4)
    write_adapter(tmp_path / "open" / "two", seed=2)
    return tmp_path / "open"


@pytest.fixture
def api(make_api: Callable[..., Api], folder: Path) -> Api:
    return make_api(allowed=[folder])


def test_a_loaded_adapter_is_a_model_and_in_the_registry(api: Api, folder: Path) -> None:
    response = load(api, "new", folder / "one")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert "'new'" in response.text
    model = next(model for model in api.get("/v1/models").json()["data"] if model["id"] == "new")
    assert (model["root"], model["parent"]) == (str(folder / "one"), "base")
    entry = api.served.service.registry.get("new")
    assert entry is not None
    assert entry.spec.version == version_of(api, "new") == response.headers["x-loraplex-adapter-version"]
    assert api.post("/v1/chat/completions", {"model": "new", "messages": USER}).status_code == 200


@pytest.mark.parametrize("base_model", ["base", "owner/name"])
def test_a_name_may_have_a_slash(make_api: Callable[..., Api], folder: Path, base_model: str) -> None:
    api = make_api(base_model=base_model, allowed=[folder])
    version = load(api, "owner/sql", folder / "one").headers["x-loraplex-adapter-version"]
    for path in ("owner/sql", quote("owner/sql", safe=""), f"{base_model}:owner/sql"):
        assert api.get(f"/v1/models/{path}").json()["parent"] == base_model
    answer = api.post("/v1/completions", {"model": "owner/sql", "prompt": "hi"}).json()
    assert (answer["model"], answer["usage"]["adapter_version"]) == ("owner/sql", version)
    assert 'adapter="owner/sql"' in api.get("/metrics").text
    assert unload(api, "owner/sql").status_code == 200
    assert api.get("/v1/models/owner/sql").status_code == 404
    assert load(api, "owner/name", folder / "one").status_code == (400 if base_model == "owner/name" else 200)


@pytest.mark.parametrize("base_model", ["base", "owner/name"])
def test_one_model_is_described_as_in_the_list(make_api: Callable[..., Api], base_model: str) -> None:
    api = make_api(base_model=base_model)
    listed = {model["id"]: model for model in api.get("/v1/models").json()["data"]}
    assert listed.keys() == {base_model, "pirate", "poet"}
    for model_id, expected in listed.items():
        assert api.get(f"/v1/models/{model_id}").json() == expected
    assert expected.keys() >= {"id", "object", "created", "owned_by"}
    longer = f"{base_model}:pirate"
    assert api.get(f"/v1/models/{longer}").json() == {**listed["pirate"], "id": longer}
    quoted = quote(longer, safe="")
    assert api.get(f"/v1/models/{quoted}").json() == {**listed["pirate"], "id": longer}
    assert api.get("/v1/models/").json() == api.get("/v1/models").json()


@pytest.mark.parametrize("model_id", ["pirat", "owner/pirate", "base:nobody", "no such/thing"])
def test_a_model_that_is_not_served_is_not_found(api: Api, model_id: str) -> None:
    response = api.get(f"/v1/models/{model_id}")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert repr(model_id) in error["message"]


def test_the_list_of_adapters_tells_what_the_engine_knows(make_api: Callable[..., Api], folder: Path) -> None:
    api = make_api(says("Hello", adapter_hit=True), allowed=[folder])
    load(api, "new", folder / "one")
    api.post("/v1/chat/completions", {"model": "new", "messages": USER})
    info = next(a for a in api.get("/v1/adapters").json()["data"] if a["name"] == "new")
    assert info["rank"] == 4
    assert (info["tier"], info["bytes"], info["hits"], info["loads"]) == ("host", 4096, 1, 1)
    assert info["requests"] == 1
    assert info["tokens"] > 0


def test_two_names_of_one_version_are_counted_each_for_itself(
    make_api: Callable[..., Api], folder: Path
) -> None:
    api = make_api(says("Hello", adapter_hit=True), allowed=[folder])
    for name in ("new", "alias"):
        load(api, name, folder / "one")
    for _ in range(3):
        api.post("/v1/chat/completions", {"model": "new", "messages": USER, "n": 2})
    listed = {a["name"]: a for a in api.get("/v1/adapters").json()["data"]}
    assert listed["new"]["version"] == listed["alias"]["version"]
    assert (listed["new"]["hits"], listed["alias"]["hits"]) == (3, 0)
    assert (listed["new"]["in_flight"], listed["alias"]["in_flight"]) == (0, 0)
    page = api.get("/metrics").text
    assert [line for line in page.splitlines() if line.startswith("loraplex:adapter_hits_total")] == [
        'loraplex:adapter_hits_total{adapter="new"} 3'
    ]
    version = listed["new"]["version"]
    assert page.count(f'loraplex:adapter_loads_total{{version="{version}"}} 1\n') == 1


def test_an_adapter_of_another_base_that_fits_is_served_with_a_warning(
    api: Api, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_adapter(folder / "mine", base_model_name_or_path="models/Base")
    assert load(api, "mine", folder / "mine").status_code == 200
    assert caplog.messages == []
    write_adapter(folder / "other", seed=3, base_model_name_or_path="some/base-instruct")
    assert load(api, "other", folder / "other").status_code == 200
    [warning] = caplog.messages
    assert "'other'" in warning
    assert "trained on 'some/base-instruct'" in warning
    assert "not on 'base'" in warning
    assert api.post("/v1/completions", {"model": "other", "prompt": "x"}).status_code == 200


def test_a_name_that_is_taken_needs_load_inplace(api: Api, folder: Path) -> None:
    assert load(api, "new", folder / "one").status_code == 200
    response = load(api, "new", folder / "two")
    assert response.status_code == 400
    assert "load_inplace" in response.json()["error"]["message"]
    first = version_of(api, "new")
    assert load(api, "new", folder / "two", load_inplace=True).status_code == 200
    assert version_of(api, "new") != first


def test_unload_forgets_the_name_and_the_version(api: Api, folder: Path) -> None:
    load(api, "new", folder / "one")
    version = version_of(api, "new")
    response = unload(api, "new")
    assert response.status_code == 200
    assert "removed" in response.text
    assert api.served.engine.removed == [version]
    assert api.served.service.registry.names() == []
    assert unload(api, "new").status_code == 404
    assert api.post("/v1/completions", {"model": "new", "prompt": "x"}).status_code == 404


def test_the_base_model_cannot_be_unloaded(api: Api) -> None:
    response = unload(api, "base")
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["message"], error["param"]) == (
        "'base' is the base model, which has no versions and cannot be unloaded",
        "lora_name",
    )


def test_an_adapter_the_base_model_took_the_name_of_can_be_forgotten(api: Api, folder: Path) -> None:
    api.served.service.registry.put("base", read_adapter(folder / "one", SHAPE))
    assert unload(api, "base").status_code == 200
    assert unload(api, "base").status_code == 400
    assert api.post("/v1/completions", {"model": "base", "prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("model", "near"),
    [("pirat", "'pirate'"), ("base:pirat", "'base:pirate'"), ("bas", "'base'"), ("base:", "'base'")],
)
def test_a_misspelt_model_is_answered_with_what_may_be_meant(api: Api, model: str, near: str) -> None:
    response = api.post("/v1/completions", {"model": model, "prompt": "x"})
    assert response.status_code == 404
    assert response.json()["error"]["message"].endswith(f"does not exist; did you mean {near}?")


def test_a_misspelt_adapter_to_unload_is_never_taken_for_the_base_model(api: Api) -> None:
    message = unload(api, "bas").json()["error"]["message"]
    assert message == "the adapter 'bas' is not loaded; GET /v1/adapters lists those that are"
    assert "did you mean 'poet'?" in unload(api, "poe").json()["error"]["message"]


def test_unload_forgets_a_name_that_is_only_registered(api: Api, folder: Path) -> None:
    api.served.service.registry.put("gone", read_adapter(folder / "one", SHAPE))
    shutil.rmtree(folder / "one")
    assert unload(api, "gone").status_code == 200
    assert api.served.service.registry.names() == []
    assert unload(api, "gone").status_code == 404


def test_a_version_with_another_name_stays(api: Api, folder: Path) -> None:
    load(api, "first", folder / "one")
    load(api, "second", folder / "one")
    assert version_of(api, "first") == version_of(api, "second")
    unload(api, "first")
    assert api.served.engine.removed == []
    assert api.post("/v1/completions", {"model": "second", "prompt": "x"}).status_code == 200
    unload(api, "second")
    assert len(api.served.engine.removed) == 1


def test_two_changes_of_one_name_at_once_conflict(api: Api, folder: Path) -> None:
    engine = api.served.engine

    async def race() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        engine.add_gate = asyncio.Event()
        body = {"lora_name": "new", "lora_path": str(folder / "one")}
        first = asyncio.create_task(api.send("POST", "/v1/load_lora_adapter", json=body))
        while not api.served.service.follower.is_changing("new"):
            await asyncio.sleep(0)
        second = await api.send("POST", "/v1/load_lora_adapter", json=body)
        other = asyncio.create_task(
            api.send("POST", "/v1/load_lora_adapter", json={**body, "lora_name": "other"})
        )
        engine.add_gate.set()
        return await first, second, await other

    first, second, other = api.run(race())
    assert (first.status_code, second.status_code, other.status_code) == (200, 409, 200)
    assert "right now" in second.json()["error"]["message"]


def test_requests_in_flight_keep_the_version_they_began_with(
    make_api: Callable[..., Api], folder: Path
) -> None:
    async def scenario() -> None:
        resume = asyncio.Event()
        api.served.engine.script = says(TEXT, pause_after=2, resume=resume)
        body = {"model": "new", "messages": USER}
        running = asyncio.create_task(api.send("POST", "/v1/chat/completions", json=body))
        while not api.served.engine.was_paused.is_set():
            await asyncio.sleep(0)
        reload = {"lora_name": "new", "lora_path": str(folder / "two"), "load_inplace": True}
        assert (await api.send("POST", "/v1/load_lora_adapter", json=reload)).status_code == 200
        assert api.served.engine.removed == []  # still in use
        resume.set()
        assert (await running).status_code == 200
        later = await api.send("POST", "/v1/chat/completions", json=body)
        assert later.status_code == 200
        while not api.served.engine.removed:
            await asyncio.sleep(0)

    api = make_api(allowed=[folder])
    load(api, "new", folder / "one")
    old = version_of(api, "new")
    api.run(scenario())
    assert [request.adapter for request in api.served.engine.requests] == [old, version_of(api, "new")]
    assert api.served.engine.removed == [old]


def test_unload_says_so_when_requests_do_not_end_in_time(make_api: Callable[..., Api], folder: Path) -> None:
    async def scenario() -> None:
        resume = asyncio.Event()
        api.served.engine.script = says(TEXT, pause_after=2, resume=resume)
        body = {"model": "new", "messages": USER}
        running = asyncio.create_task(api.send("POST", "/v1/chat/completions", json=body))
        while not api.served.engine.was_paused.is_set():
            await asyncio.sleep(0)
        response = await api.send("POST", "/v1/unload_lora_adapter", json={"lora_name": "new"})
        assert response.status_code == 200
        assert "draining" in response.text
        assert (await api.send("POST", "/v1/chat/completions", json=body)).status_code == 404
        resume.set()
        assert (await running).status_code == 200
        while not api.served.engine.removed:
            await asyncio.sleep(0)

    api = make_api(allowed=[folder], drain_timeout_s=0.0)
    load(api, "new", folder / "one")
    api.run(scenario())


def test_a_new_adapter_of_the_name_keeps_its_counters_when_the_old_one_has_drained(
    api: Api, folder: Path
) -> None:
    async def scenario() -> None:
        lease = api.served.service.lease("new", key="k")
        body = {"lora_name": "new"}
        unloading = asyncio.create_task(api.send("POST", "/v1/unload_lora_adapter", json=body))
        while "new" in {adapter.name for adapter in api.served.service.served()}:
            await asyncio.sleep(0)
        await api.served.service.load("new", str(folder / "two"), replace=False)
        request = {"model": "new", "prompt": "x"}
        assert (await api.send("POST", "/v1/completions", json=request)).status_code == 200
        lease.release()
        assert (await unloading).status_code == 200

    load(api, "new", folder / "one")
    api.run(scenario())
    [info] = [a for a in api.get("/v1/adapters").json()["data"] if a["name"] == "new"]
    assert info["requests"] == 1


def test_a_version_that_comes_back_while_it_is_retired_stays(api: Api, folder: Path) -> None:
    async def scenario() -> None:
        lease = api.served.service.lease("new", key="k")
        unloading = asyncio.create_task(api.served.service.unload("new", drain_timeout_s=30))
        while "new" in {adapter.name for adapter in api.served.service.served()}:
            await asyncio.sleep(0)
        await api.served.service.load("again", str(folder / "one"), replace=False)
        lease.release()
        assert await unloading

    load(api, "new", folder / "one")
    api.run(scenario())
    assert api.served.engine.removed == []
    assert api.post("/v1/completions", {"model": "again", "prompt": "x"}).status_code == 200


def test_a_database_that_cannot_grow_refuses_a_load_in_words(api: Api, folder: Path) -> None:
    service = api.served.service
    [num_pages] = service.registry._connection.execute("PRAGMA page_count").fetchone()
    service.registry._connection.execute(f"PRAGMA max_page_count = {num_pages}")

    def fill() -> None:  # with smaller entries than the one below, up to its place in the order
        for number in range(1000):
            service.registry.put(f"filler-{number:03}", make_spec("v"))

    with pytest.raises(StorageError):
        fill()
    fillers, before = service.registry.names(), dict(api.served.engine.adapters)
    response = load(api, "new", folder / "one")
    assert response.status_code == 507, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "disk_full")
    assert "state: the disk is full, nothing was changed; free some space" in error["message"]

    async def settle() -> None:
        await asyncio.gather(*service._retirements)

    api.run(settle())
    assert (service.registry.names(), api.served.engine.adapters) == (fillers, before)
    assert api.post("/v1/completions", {"model": "new", "prompt": "x"}).status_code == 404
    service.registry._connection.execute(f"PRAGMA max_page_count = {2 * num_pages}")
    assert load(api, "new", folder / "one").status_code == 200


@pytest.mark.parametrize("replacing", [False, True])
def test_a_disk_that_fails_leaves_everything_as_it_was(
    api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch, replacing: bool
) -> None:
    if replacing:
        load(api, "new", folder / "one")
    before = dict(api.served.engine.adapters)

    def failing(*args: Any, **options: Any) -> None:
        raise StorageError("the disk refused a write; check the disk") from sqlite3.OperationalError()

    monkeypatch.setattr(api.served.service.registry, "put_unless_changed", failing)
    response = load(api, "new", folder / "two", load_inplace=True)
    assert response.status_code == 409
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "storage_failed")
    assert "check the disk" in error["message"]

    async def settle() -> None:
        await asyncio.gather(*api.served.service._retirements)

    api.run(settle())
    assert api.served.engine.adapters == before
    names = {adapter.name for adapter in api.served.service.served()}
    assert ("new" in names) == replacing

    monkeypatch.setattr(api.served.service.registry, "remove", failing)
    if replacing:
        assert unload(api, "new").status_code == 409
        assert api.post("/v1/completions", {"model": "new", "prompt": "x"}).status_code == 200


def test_a_relative_path_is_looked_for_in_the_open_folders_and_the_working_directory(
    make_api: Callable[..., Api], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "adapters" / "late", seed=1)
    write_adapter(tmp_path / "elsewhere" / "sql", seed=2)
    monkeypatch.chdir(tmp_path)
    api = make_api(allowed=[Path("adapters")])
    for name, path in (("a", "./adapters/late"), ("b", "adapters/late"), ("c", "late")):
        assert load(api, name, path).status_code == 200
    for path, status in (("elsewhere/sql", 403), ("./elsewhere/sql", 400), ("missing", 400)):
        response = load(api, "new", path)
        assert response.status_code == status
        message = response.json()["error"]["message"]
        assert message.startswith(f"there is no folder {path} in {tmp_path / 'adapters'}, and none in the ")
        assert f"{tmp_path} " not in message
        assert "give an absolute path" in message
