from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from adapter_calls import load, unload, version_of
from server_fixtures import SHAPE, Api, write_adapter

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.peft_reader import read_adapter, read_adapters
from loraplex.adapters.registry import Origin
from loraplex.core.errors import AdapterError, CapacityError
from loraplex.server import adapter_startup, candidate_files
from loraplex.server.adapter_choice import GivenAdapter
from loraplex.server.adapter_startup import StartReport, start_adapters
from loraplex.server.left_out import retry_left_out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is open for loading, with the adapters `one` and `two` in it."""
    write_adapter(tmp_path / "open" / "one", seed=1, rank=4)
    write_adapter(tmp_path / "open" / "two", seed=2)
    return tmp_path / "open"


@pytest.fixture
def api(make_api: Callable[..., Api], folder: Path) -> Api:
    return make_api(allowed=[folder])


def restart(api: Api, *folders: Path, given: Sequence[GivenAdapter] = ()) -> StartReport:
    """Do what a new process on the same state folder does."""
    api.served.service._served.clear()
    report: StartReport = api.run(start_adapters(api.served.service, folders, given))
    return report


def paths(api: Api) -> dict[str, Path]:
    return {adapter.name: adapter.spec.path for adapter in api.served.service.served()}


def test_the_folder_given_now_decides_what_a_name_is(api: Api, tmp_path: Path) -> None:
    runs = [tmp_path / "run1", tmp_path / "run2"]
    for seed, folder in enumerate(runs):
        write_adapter(folder / "bot", seed=seed)
    restart(api, runs[0])
    report = restart(api, runs[1])
    assert paths(api) == {"bot": runs[1] / "bot"}
    assert any("instead of" in note for note in report.notes)
    entry = api.served.service.registry.get("bot")
    assert entry is not None
    assert (entry.origin, entry.spec.path) == (Origin.FOLDER, runs[1] / "bot")
    assert restart(api, runs[1]).notes == ()


def test_adapters_of_a_folder_that_is_not_given_any_more_are_forgotten(api: Api, folder: Path) -> None:
    restart(api, folder)
    load(api, "by-hand", folder / "one")
    assert set(paths(api)) == {"one", "two", "by-hand"}
    report = restart(api)
    assert (set(paths(api)), report.num_skipped) == ({"by-hand"}, 0)
    assert api.served.service.registry.names() == ["by-hand"]


def test_an_adapter_of_a_folder_that_was_reloaded_through_the_api_stays_that(api: Api, folder: Path) -> None:
    restart(api, folder)
    load(api, "two", folder / "one", load_inplace=True)
    restart(api, folder)
    assert paths(api)["two"] == folder / "one"
    restart(api)
    assert paths(api) == {"two": folder / "one"}


def test_what_is_given_now_is_served_where_that_of_the_api_is_gone(api: Api, folder: Path) -> None:
    load(api, "two", folder / "one")
    shutil.rmtree(folder / "one")
    report = restart(api, folder)
    assert (paths(api), report.num_skipped) == ({"two": folder / "two"}, 0)
    [note] = report.notes
    assert note.startswith(
        f"adapter 'two': serving {folder / 'two'} instead of {folder / 'one'}, which was loaded through the "
        "API and is not served: "
    )

    # The registry keeps what the API loaded, for when its files are back.
    write_adapter(folder / "one", seed=1, rank=4)
    restart(api, folder)
    assert paths(api)["two"] == folder / "one"
    assert unload(api, "two").status_code == 200
    restart(api, folder)
    assert paths(api)["two"] == folder / "two"


def test_where_neither_that_of_the_api_nor_the_given_one_can_be_served_both_are_named(
    api: Api, folder: Path
) -> None:
    load(api, "two", folder / "one")
    shutil.rmtree(folder / "one")
    write_adapter(folder / "two", use_dora=True)
    report = restart(api, folder)
    assert (paths(api), report.num_skipped) == ({}, 1)
    [note] = report.notes
    assert note.startswith(f"adapter 'two' is not served: neither {folder / 'one'}")
    assert "use_dora" in note
    assert api.served.service.registry.names() == ["two"]


@pytest.mark.parametrize("given", ["another folder", "no folder"])
def test_an_adapter_of_the_api_is_not_served_from_a_folder_that_is_closed_now(
    api: Api, folder: Path, tmp_path: Path, given: str
) -> None:
    load(api, "two", folder / "one")
    more = tmp_path / "more"
    write_adapter(more / "two", seed=9)
    api.served.service.files.allowed = AllowedPaths([more] if given == "another folder" else [])
    report = restart(api, *([more] if given == "another folder" else []))
    [closed] = report.notes
    assert f"{folder / 'one'} is outside the folders" in closed
    assert f"--allow-adapter-dir {folder} " in closed
    if given == "another folder":
        assert (paths(api), report.num_skipped) == ({"two": more / "two"}, 0)
        assert closed.startswith(f"adapter 'two': serving {more / 'two'} instead of")
    else:
        assert (paths(api), report.num_skipped) == ({}, 1)
        assert closed.startswith("adapter 'two' is not served:")

    # It is neither forgotten nor replaced by the folder's: it is served again as soon as it may be.
    assert api.served.service.registry.names() == ["two"]
    api.served.service.files.allowed = AllowedPaths([folder])
    assert restart(api).notes == ()
    assert paths(api) == {"two": folder / "one"}


@pytest.mark.parametrize("is_open", [True, False])
def test_the_folder_that_the_api_loaded_may_be_given_as_well(api: Api, folder: Path, is_open: bool) -> None:
    restart(api, folder)
    load(api, "two", folder / "two", load_inplace=True)
    api.served.service.files.allowed = AllowedPaths([folder] if is_open else [])
    assert restart(api, folder).notes == ()
    assert paths(api)["two"] == folder / "two"

    # It is still the API's, also in a new version.
    write_adapter(folder / "two", seed=7)
    assert restart(api, folder).notes == ("adapter 'two': its files have changed; serving the new version",)
    assert restart(api, folder).notes == ()
    api.served.service.files.allowed = AllowedPaths([folder])
    assert restart(api).notes == ()
    assert paths(api) == {"two": folder / "two"}


def test_adapters_are_given_to_the_engine_a_few_at_a_time_and_in_order(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        write_adapter(tmp_path / "many" / f"a{number}", seed=number)
    engine = api.served.engine
    begun: list[str] = []
    most = under_way = 0

    async def add(spec: Any) -> None:
        nonlocal most, under_way
        begun.append(spec.path.name)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        engine.adapters[spec.version] = spec

    monkeypatch.setattr(engine, "add_adapter", add)
    assert restart(api, tmp_path / "many").num_served == 6
    assert begun == [f"a{number}" for number in range(6)]
    assert most == adapter_startup._NUM_AT_ONCE


def test_the_first_of_two_folders_with_one_name_wins(api: Api, folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "more" / "two", seed=9)
    report = restart(api, folder, tmp_path / "more")
    assert paths(api)["two"] == folder / "two"
    [note] = report.notes
    assert "is taken by" in note
    assert report.num_skipped == 1


def test_a_server_starts_with_its_folders_and_its_registry(api: Api, folder: Path) -> None:
    service = api.served.service
    by_hand = write_adapter(folder / "three" / "deep" / "by-hand", seed=3)
    service.registry.put("by-hand", read_adapter(by_hand, SHAPE))
    write_adapter(folder / "broken", use_dora=True)
    write_adapter(folder / "base")
    (folder / "empty").mkdir()
    report = api.run(start_adapters(service, [folder]))
    assert {"one", "two", "by-hand"} <= {adapter.name for adapter in service.served()}
    assert (report.num_served, report.num_skipped) == (3, 2)
    notes = "\n".join(report.notes)
    assert "'broken'" in notes
    assert "use_dora" in notes
    assert "'base'" in notes
    assert service.registry.names() == ["by-hand", "one", "two"]


def test_a_restart_reads_only_what_has_changed(
    api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.run(start_adapters(api.served.service, [folder]))
    before = {name: version_of(api, name) for name in ("one", "two")}
    write_adapter(folder / "one", seed=99)
    reads: list[Path] = []

    def recording(paths: list[Path], shape: Any, **_: Any) -> Any:
        reads.extend(paths)
        return [read_adapter(path, shape) for path in paths]

    monkeypatch.setattr(candidate_files, "read_adapters", recording)
    report = api.run(start_adapters(api.served.service, [folder]))
    assert reads == [folder / "one"]
    assert any("changed" in note and "'one'" in note for note in report.notes)
    assert version_of(api, "one") != before["one"]
    assert version_of(api, "two") == before["two"]


def test_adapters_of_another_base_are_noted_at_every_start(api: Api, folder: Path) -> None:
    for name in ("one", "two"):
        write_adapter(folder / name, base_model_name_or_path="some/other")
    for _ in range(2):
        report = restart(api, folder)
        assert set(paths(api)) == {"one", "two"}
        [note] = report.notes
        assert note.startswith("adapters 'one', 'two': trained on 'some/other'")
        assert "not on 'base'" in note


def test_a_registered_adapter_whose_files_are_gone_is_skipped(api: Api, folder: Path) -> None:
    load(api, "gone", folder / "one")
    unload(api, "pirate")
    shutil.rmtree(folder / "one")
    api.served.service._served.clear()
    report = api.run(start_adapters(api.served.service, [folder]))
    assert [adapter.name for adapter in api.served.service.served()] == ["two"]
    assert any("'gone'" in note for note in report.notes)
    assert report.num_skipped == 1


def test_a_name_loaded_by_hand_is_not_taken_by_a_folder(api: Api, folder: Path) -> None:
    load(api, "two", folder / "one")
    by_hand = version_of(api, "two")
    report = api.run(start_adapters(api.served.service, [folder]))
    assert version_of(api, "two") == by_hand
    assert any("through the API" in note for note in report.notes)


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("new", {"use_dora": True}, "use_dora"),
        ("new", {"target_modules": ["up_proj"]}, "q_proj"),
        ("base", {}, "the base model is called 'base'"),
    ],
)
def test_an_adapter_that_is_given_by_itself_must_be_served(
    api: Api, folder: Path, tmp_path: Path, name: str, config: dict[str, Any], words: str, is_remembered: bool
) -> None:
    if is_remembered:  # but cannot be served either
        api.served.service.registry.put(name, read_adapter(folder / "one", SHAPE))
        shutil.rmtree(folder / "one")
    given = GivenAdapter(name=name, source=write_adapter(tmp_path / "given", **config))
    with pytest.raises(AdapterError) as caught:
        restart(api, folder, given=[given])
    message = str(caught.value)
    assert message.startswith(f"--adapter {name}={tmp_path / 'given'} cannot be served: ")
    assert words in message
    assert "start without this option" in message


def test_an_adapter_that_is_given_by_itself_and_too_large_fails_the_start(
    api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(spec: Any) -> None:
        raise CapacityError("it needs 9 GiB; raise --host-adapter-memory")

    monkeypatch.setattr(api.served.engine, "add_adapter", refuse)
    with pytest.raises(AdapterError, match=r"--adapter one=.* 9 GiB; raise --host-adapter-memory"):
        restart(api, given=[GivenAdapter(name="one", source=folder / "one")])
    assert restart(api, folder).num_skipped == 2


@pytest.mark.parametrize("is_ready", [True, False])
def test_readiness_says_when_no_adapter_is_served(
    make_api: Callable[..., Api], folder: Path, monkeypatch: pytest.MonkeyPatch, is_ready: bool
) -> None:
    """`is_ready`: the server's own engines refuse all of them; else servers elsewhere do."""
    api = make_api(allowed=[folder], is_ready_without_adapters=is_ready)

    async def refuse(spec: Any) -> None:
        raise CapacityError("it needs 9 GiB")

    monkeypatch.setattr(api.served.engine, "add_adapter", refuse)
    restart(api, folder)
    answer = api.get("/health/ready")
    why = "none of 2 adapters is served; 'one': it needs 9 GiB"
    if is_ready:
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "message": why})
    else:
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, why)


def test_what_the_engine_refuses_is_tried_again_and_served_when_it_is_taken(
    api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = api.served.service
    restart(api, folder)
    load(api, "by-hand", folder / "one")
    load(api, "by-hand", folder / "two", canary_share=0.5)
    load(api, "given-up", folder / "one")
    registered = {entry.name: (entry.origin, entry.rollout.canary) for entry in service.registry.all()}

    async def refuse(spec: Any) -> None:
        raise CapacityError("open the folder there")

    with monkeypatch.context() as patch:
        patch.setattr(api.served.engine, "add_adapter", refuse)
        report = restart(api, folder)
        assert (report.num_served, report.num_skipped) == (0, 4)
        assert all("it is tried again from time to time" in note for note in report.notes)
        api.run(retry_left_out(service))
        assert {name: left.reason for name, left in service.left_out.items()} == dict.fromkeys(
            ("by-hand", "given-up", "one", "two"), "open the folder there"
        )
        assert unload(api, "given-up").status_code == 200
    api.run(retry_left_out(service))
    assert (set(paths(api)), service.left_out) == ({"by-hand", "one", "two"}, {})
    assert service.canary_of("by-hand") == version_of(api, "two")
    del registered["given-up"]
    assert registered == {
        entry.name: (entry.origin, entry.rollout.canary) for entry in service.registry.all()
    }


def test_what_could_not_be_read_is_read_again_when_its_files_change(
    make_api: Callable[..., Api], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_api(allowed=[folder], is_ready_without_adapters=False)
    service, reads = api.served.service, []

    def counted(paths: Sequence[Path], *args: Any, **options: Any) -> Any:
        reads.extend(paths)
        return read_adapters(paths, *args, **options)

    monkeypatch.setattr(candidate_files, "read_adapters", counted)
    shutil.rmtree(folder / "one")
    config = (folder / "two" / "adapter_config.json").read_text()
    (folder / "two" / "adapter_config.json").write_text("{")
    report = restart(api, folder)
    assert (report.num_served, report.num_skipped) == (0, 1)
    assert report.notes[0].endswith("; it is tried again from time to time")
    assert api.get("/health/ready").status_code == 200, "no server of a fleet is to blame"
    for _ in range(3):
        api.run(retry_left_out(service))
    assert (paths(api), list(service.left_out)) == ({}, ["two"])
    assert reads == 2 * [folder / "two"], "not again while nothing has changed"
    assert "loraplex:adapters_left_out{" in (page := api.get("/metrics").text)
    assert page.partition("loraplex:adapters_left_out{")[2].splitlines()[0].endswith(" 1.0")
    (folder / "two" / "adapter_config.json").write_text(config)
    api.run(retry_left_out(service))
    assert (paths(api), service.left_out) == ({"two": folder / "two"}, {})
    assert [entry.name for entry in service.registry.all()] == ["two"]


@pytest.mark.parametrize("needs_adapters", [True, False])
def test_a_front_is_not_ready_while_its_servers_refuse_every_adapter(
    make_api: Callable[..., Api], folder: Path, monkeypatch: pytest.MonkeyPatch, needs_adapters: bool
) -> None:
    api = make_api(allowed=[folder], is_ready_without_adapters=not needs_adapters)

    async def refuse(spec: Any) -> None:
        raise AdapterError("start it with --allow-adapter-dir")

    with monkeypatch.context() as patch:
        patch.setattr(api.served.engine, "add_adapter", refuse)
        restart(api, folder)
        answer = api.get("/health/ready")
        assert answer.status_code == (503 if needs_adapters else 200)
        if needs_adapters:
            message = answer.json()["error"]["message"]
            assert message == "none of 2 adapters is served; 'one': start it with --allow-adapter-dir"
    load(api, "one", folder / "one")  # one of them is enough
    assert api.get("/health/ready").status_code == 200
    assert list(api.served.service.left_out) == ["two"]
