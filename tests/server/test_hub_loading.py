"""Adapters of the hub in a server: who may load them, what happens meanwhile, and what a restart does."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from adapter_calls import load, unload, version_of
from fake_hub import FakeHub, fake_hub
from server_fixtures import USER, Api, write_adapter

from loraplex.adapters.registry import Origin
from loraplex.adapters.remote import AllowedSources, RemoteSource
from loraplex.core.errors import AdapterError
from loraplex.core.hub import HubRepo
from loraplex.server.adapter_choice import GivenAdapter
from loraplex.server.adapter_startup import StartReport, start_adapters
from loraplex.server.remote_adapters import RemoteAdapters

ONE = HubRepo(repo_id="org/one")
MORE_THAN_THREADS = 50


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(tmp_path / "hf-home") as running:
        running.push("org/one", write_adapter(tmp_path / "pushed" / "one", seed=1))
        running.push("org/two", write_adapter(tmp_path / "pushed" / "two", seed=2))
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is open for loading."""
    write_adapter(tmp_path / "open" / "org" / "mine", seed=3)
    return tmp_path / "open"


@pytest.fixture
def serve(make_api: Callable[..., Api], hub: FakeHub, folder: Path) -> Callable[..., Api]:
    def make(*patterns: str) -> Api:
        service_remote = RemoteAdapters(AllowedSources(patterns), fetch=hub.fetch_adapter)
        return make_api(allowed=[folder], remote=service_remote)

    return make


def restart(api: Api, *given: GivenAdapter, folders: tuple[Path, ...] = ()) -> StartReport:
    """Do what a new process on the same state folder does."""
    api.served.service._served.clear()
    report: StartReport = api.run(start_adapters(api.served.service, folders, given))
    return report


def paths(api: Api) -> dict[str, Path]:
    return {adapter.name: adapter.spec.path for adapter in api.served.service.served()}


def test_requests_fetch_nothing_unless_the_operator_said_so(make_api: Callable[..., Api]) -> None:
    api = make_api()
    response = load(api, "new", "org/one")
    assert response.status_code == 403
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("path_not_allowed", "lora_path")
    assert "from the Hugging Face hub is off" in error["message"]
    assert "--allow-adapter-repo org/one" in error["message"]
    assert "--allow-adapter-dir" in error["message"]
    assert api.served.service.registry.names() == []


def test_what_is_neither_folder_nor_repository_is_told_how_either_is_written(
    serve: Callable[..., Api], folder: Path
) -> None:
    response = load(serve("org/*"), "new", "org/none@")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "lora_path"
    assert error["message"].startswith(f"there is no folder org/none@ in {folder}, and none in the server's ")
    assert str(Path.cwd()) not in error["message"]
    assert "(give an absolute path), and it is no repository of the Hugging Face hub" in error["message"]
    assert "owner/name@revision" in error["message"]


def test_a_repository_that_is_open_is_loaded_at_its_commit(serve: Callable[..., Api], hub: FakeHub) -> None:
    api = serve("org/one", "other/*")
    assert load(api, "new", "org/two").status_code == 403
    assert load(api, "new", "org/one@../x").status_code == 400  # a path, to nothing
    assert hub.fetched == []
    assert load(api, "new", "org/one@main").status_code == 200
    assert api.post("/v1/chat/completions", {"model": "new", "messages": USER}).status_code == 200
    sha = hub.repos["org/one"].branches["main"].sha
    assert paths(api)["new"].name == sha
    entry = api.served.service.registry.get("new")
    assert entry is not None
    assert (entry.origin, entry.source) == (Origin.API, ONE.at(sha))


def test_an_open_folder_of_that_name_wins(
    serve: Callable[..., Api], hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    hub.push("org/mine", tmp_path / "pushed" / "one")
    api = serve("*")
    assert load(api, "new", "org/mine").status_code == 200
    assert paths(api)["new"] == folder / "org" / "mine"
    (folder / "org" / "one").symlink_to(tmp_path / "pushed" / "one")  # there, but outside
    assert load(api, "other", "org/one").status_code == 403
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("files", "code", "words"),
    [
        (None, "adapter_fetch_failed", "no such repository"),
        ({"config.json": b"{}"}, None, "not that of a whole model"),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b""}, None, "safe_serialization"),
    ],
)
def test_what_cannot_be_had_changes_nothing(
    serve: Callable[..., Api], hub: FakeHub, files: dict[str, bytes] | None, code: str | None, words: str
) -> None:
    if files is not None:
        hub.push("org/new", files)
    api = serve("*")
    before = dict(api.served.engine.adapters)
    response = load(api, "new", "org/new")
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, "lora_path")
    assert words in error["message"]
    assert (api.served.service.registry.names(), api.served.engine.adapters) == ([], before)


def test_downloads_hold_up_nobody_and_show_nothing_before_they_are_whole(
    make_api: Callable[..., Api], folder: Path
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(repo: HubRepo) -> Path:
        begun.set()
        assert go_on.wait(60)
        return folder / "org" / "mine"

    api = make_api(allowed=[folder], remote=RemoteAdapters(AllowedSources(["*"]), fetch=slow))

    async def scenario() -> list[int]:
        def post(name: str, path: str) -> asyncio.Task[int]:
            async def status() -> int:
                body = {"lora_name": name, "lora_path": path}
                return (await api.send("POST", "/v1/load_lora_adapter", json=body)).status_code

            return asyncio.create_task(status())

        slow_ones = [post(f"slow-{number}", "org/one") for number in range(MORE_THAN_THREADS)]
        while not begun.is_set():
            await asyncio.sleep(0)
        try:
            assert await post("mine", "org/mine") == 200
            assert await post("slow-0", "org/mine") == 409
            request = {"model": "slow-0", "prompt": "x"}
            assert (await api.send("POST", "/v1/completions", json=request)).status_code == 404
            assert api.served.service.registry.names() == ["mine"]
        finally:
            go_on.set()
        return list(await asyncio.gather(*slow_ones))

    assert set(api.run(scenario())) == {200}
    assert len(api.served.service.registry.names()) == 1 + MORE_THAN_THREADS


def test_a_restart_serves_the_commit_that_was_loaded(
    serve: Callable[..., Api], hub: FakeHub, tmp_path: Path
) -> None:
    api = serve("org/*")
    load(api, "new", "org/one")
    version = version_of(api, "new")
    hub.push("org/one", tmp_path / "pushed" / "two")
    fetched = len(hub.fetched)
    assert restart(api).notes == ()
    assert (version_of(api, "new"), len(hub.fetched)) == (version, fetched)
    assert load(api, "new", "org/one", load_inplace=True).status_code == 200
    assert version_of(api, "new") != version


def test_a_restart_fetches_again_what_the_cache_has_lost(serve: Callable[..., Api], hub: FakeHub) -> None:
    api = serve("org/*")
    load(api, "new", "org/one")
    version, entry = version_of(api, "new"), api.served.service.registry.get("new")
    shutil.rmtree(hub.home)
    assert restart(api).notes == ()
    assert version_of(api, "new") == version
    again = api.served.service.registry.get("new")
    assert entry is not None
    assert again is not None
    assert again.source == entry.source

    shutil.rmtree(hub.home)
    del hub.repos["org/one"]
    report = restart(api)
    assert (paths(api), report.num_skipped) == ({}, 1)
    [note] = report.notes
    assert note.startswith(
        "adapter 'new' is not served: org/one is no folder here, and the Hugging Face hub has no"
    )
    assert api.served.service.registry.names() == ["new"]


def test_an_adapter_of_s3_is_remembered_with_its_revision(
    make_api: Callable[..., Api], folder: Path, tmp_path: Path
) -> None:
    """Fetching itself is tested with a store; see tests/adapters."""
    source, revision = "s3://models/loras/one", "0" * 32
    fetched: list[str] = []

    def fetch(remote: RemoteSource) -> Path:
        fetched.append(str(remote))
        return tmp_path / "cache" / revision

    write_adapter(tmp_path / "cache" / revision, seed=1)
    remote = RemoteAdapters(AllowedSources(["s3://models/loras/*"]), fetch=fetch)
    api = make_api(allowed=[folder], remote=remote)
    refused = load(api, "other", "s3://models/private/one")
    assert refused.status_code == 403
    assert "--allow-adapter-repo s3://models/private/one" in refused.json()["error"]["message"]
    assert load(api, "odd", "s3://models/../one").status_code == 400
    assert load(api, "new", source).status_code == 200
    assert fetched == [source]
    entry = api.served.service.registry.get("new")
    assert entry is not None
    assert str(entry.source) == f"{source}#{revision}"

    assert restart(api).notes == ()
    assert fetched == [source], "the files are still there"
    shutil.rmtree(tmp_path / "cache")
    write_adapter(tmp_path / "cache" / revision, seed=1)
    assert restart(api).notes == ()
    assert fetched == [source, f"{source}#{revision}"], "the same revision again, not what is there now"
    assert set(paths(api)) == {"new"}


def test_a_folder_is_also_given_as_a_url(make_api: Callable[..., Api], folder: Path) -> None:
    api = make_api(allowed=[folder])
    assert load(api, "new", (folder / "org" / "mine").as_uri()).status_code == 200
    assert paths(api)["new"] == folder / "org" / "mine"
    assert load(api, "etc", "file:///etc").status_code == 403
    assert load(api, "odd", "file://elsewhere/etc").status_code == 400


def test_a_restart_does_not_serve_a_repository_that_is_closed_now(serve: Callable[..., Api]) -> None:
    api = serve("org/*")
    load(api, "new", "org/one")
    api.served.service.files.remote.allowed = AllowedSources()
    report = restart(api)
    assert (paths(api), report.num_skipped) == ({}, 1)
    [note] = report.notes
    assert note.startswith("adapter 'new' is not served: org/one is no repository that")
    assert "--allow-adapter-repo org/one to serve it again" in note
    api.served.service.files.remote.allowed = AllowedSources(["org/one"])
    assert restart(api).notes == ()
    assert set(paths(api)) == {"new"}


def test_a_server_starts_with_adapters_of_the_hub_and_follows_their_branch(
    serve: Callable[..., Api], hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    api = serve()  # the operator's own adapters need no permission for requests
    given = (
        GivenAdapter(name="one", source=ONE),
        GivenAdapter(name="mine", source=folder / "org" / "mine"),
    )
    assert restart(api, *given).notes == ()
    assert set(paths(api)) == {"one", "mine"}
    first = paths(api)["one"]

    hub.push("org/one", tmp_path / "pushed" / "two")
    report = restart(api, given[0])
    assert set(paths(api)) == {"one"}
    [note] = report.notes
    assert note == f"adapter 'one': serving {paths(api)['one']} instead of {first}"
    assert api.served.service.registry.names() == ["one"]


def test_a_server_does_not_start_without_an_adapter_of_the_hub_that_is_given(
    serve: Callable[..., Api],
) -> None:
    with pytest.raises(AdapterError) as caught:
        restart(serve(), GivenAdapter(name="typo", source=HubRepo(repo_id="org/typo")))
    assert str(caught.value).startswith(
        "--adapter typo=org/typo cannot be served: org/typo is no folder here, and the Hugging Face hub"
    )


def test_a_name_that_is_given_twice_is_the_first_one_s(
    serve: Callable[..., Api], folder: Path, tmp_path: Path
) -> None:
    api = serve("*")
    write_adapter(tmp_path / "served" / "one", seed=9)
    report = restart(api, GivenAdapter(name="one", source=ONE), folders=(tmp_path / "served",))
    assert paths(api)["one"].parent.name == "snapshots"
    [note] = report.notes
    assert note == f"skipped {tmp_path / 'served' / 'one'}: the name 'one' is taken by org/one"
    unload(api, "one")
    load(api, "one", "org/two")
    sha = paths(api)["one"].name
    [note] = restart(api, GivenAdapter(name="one", source=ONE)).notes
    assert note.startswith(f"skipped org/one: the name 'one' was loaded from org/two@{sha} through the API")
    assert paths(api)["one"].name == sha
