"""Two servers that follow each other: applications with one real registry, each with a fake engine."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from adapter_calls import load, unload
from server_fixtures import Api, write_adapter
from test_versions import HEADER, ask, change, info, message, registered, shown

from loraplex.adapters.registry import AdapterRegistry
from loraplex.core.errors import AdapterError
from loraplex.server.adapter_choice import GivenAdapter
from loraplex.server.adapter_startup import StartReport, start_adapters
from loraplex.server.left_out import retry_left_out
from loraplex.server.registry_watch import RegistryWatch
from loraplex.server.start_notes import namesake_notes, shared_state_note


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is open for loading, with the versions v0 to v3 of an adapter."""
    for seed in range(4):
        write_adapter(tmp_path / "open" / f"v{seed}", seed=seed)
    return tmp_path / "open"


@pytest.fixture
def fronts(make_api: Callable[..., Api], folder: Path) -> tuple[Api, Api]:
    """Two servers on one state folder, which serve `bot`."""
    one, two = make_api(allowed=[folder]), make_api(allowed=[folder])
    assert load(one, "bot", folder / "v0").status_code == 200
    follow(two)
    return one, two


def follow(api: Api, *, again: bool = False) -> None:
    """Let a server check the registry once, and retry what it could not follow before."""
    service = api.served.service

    async def look() -> None:
        names = service.registered.changed_elsewhere(service.registry.states())
        for name in {*names, *(service.registered.lagging() if again else ())}:
            assert await service.follower.follow(name)
        assert service.registered.changed_elsewhere(service.registry.states()) == []
        await asyncio.gather(*service._retirements)

    api.run(look())


def start(api: Api, *folders: Path, given: tuple[GivenAdapter, ...] = ()) -> StartReport:
    api.served.service._served.clear()
    api.served.engine.adapters.clear()
    report: StartReport = api.run(start_adapters(api.served.service, folders, given))
    return report


def folders_of(api: Api) -> dict[str, str]:
    return {each.name: each.spec.path.name for each in api.served.service.served()}


def test_a_load_is_followed(fronts: tuple[Api, Api], folder: Path) -> None:
    one, two = fronts
    assert shown(two) == shown(one) == ("v0", None, [])
    assert ask(two).headers[HEADER] == ask(one).headers[HEADER]
    assert two.served.engine.staged == [], "a first load is not staged here either"


def test_a_reload_is_staged_before_it_is_followed(
    fronts: tuple[Api, Api], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fronts
    old = info(two)["version"]
    new = load(one, "bot", folder / "v1", load_inplace=True).headers[HEADER]
    served_meanwhile = []

    async def stage(version: str) -> None:
        served_meanwhile.append((version, two.served.service.version_of("bot")))

    monkeypatch.setattr(two.served.engine, "stage_adapter", stage)
    lease = two.served.service.lease("bot", key="")

    async def end() -> None:
        lease.release()

    two.served.service.registry.states()
    two.run(two.served.service.follower.follow("bot"))
    assert served_meanwhile == [(new, old)]
    assert ask(two).headers[HEADER] == new
    assert old in two.served.engine.adapters, "a request in flight keeps the version it began with"
    two.run(end())
    follow(two)
    assert old not in two.served.engine.adapters
    assert shown(two) == ("v1", None, ["v0"])


def test_what_cannot_be_staged_leaves_the_old_version_and_is_tried_again(
    fronts: tuple[Api, Api], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = fronts
    old = info(two)["version"]
    two.served.engine.stage_failure = AdapterError("its weights overflow")
    load(one, "bot", folder / "v1", load_inplace=True)
    for _ in range(2):
        follow(two, again=True)
        assert ask(two).headers[HEADER] == old
    [said] = [text for text in caplog.messages if "cannot follow" in text]
    assert f"'bot' stays with version {old[:12]}" in said
    assert "its weights overflow" in said
    assert registered(two) == ("v1", None, ["v0"]), "what one server cannot stage stays registered"
    two.served.engine.stage_failure = None
    follow(two, again=True)
    assert shown(two) == shown(one)
    assert two.served.service.registered.lagging() == []


def test_an_unload_is_followed_and_forgets_the_counters(fronts: tuple[Api, Api]) -> None:
    one, two = fronts
    dropped: list[str] = []
    two.served.service.on_dropped = dropped.append
    version = info(two)["version"]
    assert unload(one, "bot").text == "Success: LoRA adapter 'bot' removed successfully."
    follow(two)
    assert two.get("/v1/models/bot").status_code == 404
    assert two.served.engine.removed == [version]
    assert dropped == ["bot"]


def test_canaries_promotions_and_rollbacks_are_followed(fronts: tuple[Api, Api], folder: Path) -> None:
    one, two = fronts
    steps: list[Callable[[Api], Any]] = [
        lambda api: load(api, "bot", folder / "v1", canary_share=0.3),
        lambda api: load(api, "bot", folder / "v1", canary_share=0.6),
        lambda api: change(api, "abort"),
        lambda api: load(api, "bot", folder / "v2", canary_share=0.5),
        lambda api: change(api, "promote"),
        lambda api: load(api, "bot", folder / "v3", load_inplace=True),
        lambda api: change(api, "rollback"),
    ]
    for number, step in enumerate(steps):
        here, there = (one, two) if number % 2 else (two, one)
        assert step(here).status_code == 200
        follow(there)
        assert shown(there) == shown(here) == registered(here)
        assert info(there)["canary"] == info(here)["canary"]
        keys = [f"user-{key}" for key in range(20)]
        assert [ask(there, key).headers[HEADER] for key in keys] == [
            ask(here, key).headers[HEADER] for key in keys
        ]
        assert set(there.served.engine.adapters) == set(here.served.engine.adapters)
    assert shown(one) == ("v2", None, ["v0"])


def test_a_change_begins_with_what_the_other_server_has_just_made(
    fronts: tuple[Api, Api], folder: Path
) -> None:
    one, two = fronts
    load(one, "bot", folder / "v1", canary_share=0.5)
    assert "promote or abort it" in message(load(two, "bot", folder / "v2", load_inplace=True), 400)
    assert change(two, "promote").status_code == 200
    assert load(one, "bot", folder / "v2", load_inplace=True).status_code == 200
    assert change(two, "rollback").status_code == 200
    follow(one)
    assert shown(one) == shown(two) == registered(one) == ("v1", None, ["v0"])
    assert unload(one, "bot").status_code == 200
    assert load(two, "bot", folder / "v3").status_code == 200
    assert "already loaded" in message(load(one, "bot", folder / "v3"), 400)
    assert shown(one) == shown(two) == ("v3", None, [])


@pytest.mark.parametrize("meanwhile", ["reload", "canary", "unload"])
def test_of_two_changes_at_once_through_two_servers_one_is_done(
    fronts: tuple[Api, Api], folder: Path, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fronts
    changes: dict[str, Callable[[], Any]] = {
        "reload": lambda: load(one, "bot", folder / "v1", load_inplace=True),
        "canary": lambda: load(one, "bot", folder / "v1", canary_share=0.5),
        "unload": lambda: unload(one, "bot"),
    }

    async def stage(version: str) -> None:
        answer = await asyncio.to_thread(changes[meanwhile])
        assert answer.status_code == 200

    with monkeypatch.context() as patch:
        patch.setattr(two.served.engine, "stage_adapter", stage)
        refused = load(two, "bot", folder / "v2", load_inplace=True)
    assert "was changed through another server on the state folder meanwhile" in message(refused, 409)
    follow(two)
    assert folders_of(one).get("bot") == folders_of(two).get("bot")
    if meanwhile != "unload":
        assert shown(one) == shown(two) == registered(two)
    assert set(one.served.engine.adapters) == set(two.served.engine.adapters)


def test_the_same_load_through_both_at_once_is_done_by_both(
    fronts: tuple[Api, Api], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fronts

    async def stage(version: str) -> None:
        answer = await asyncio.to_thread(lambda: load(one, "bot", folder / "v1", load_inplace=True))
        assert answer.status_code == 200

    monkeypatch.setattr(two.served.engine, "stage_adapter", stage)
    assert load(two, "bot", folder / "v1", load_inplace=True).status_code == 200
    follow(one)
    assert shown(one) == shown(two) == ("v1", None, ["v0"])


def test_what_is_closed_on_one_server_is_not_served_there(
    make_api: Callable[..., Api], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_adapter(tmp_path / "closed" / "v9", seed=9)
    one, two = make_api(allowed=[folder, tmp_path / "closed"]), make_api(allowed=[folder])
    load(one, "bot", tmp_path / "closed" / "v9")
    load(one, "prod", folder / "v0")
    follow(two)
    assert folders_of(two) == {"pirate": "pirate", "poet": "poet", "prod": "v0"}
    [said] = [text for text in caplog.messages if "cannot follow" in text]
    assert "'bot' is not served here" in said
    assert "--allow-adapter-dir" in said
    assert start(two).notes[0].startswith("adapter 'bot' is not served")
    assert "bot" in two.served.service.registry.names()


def test_a_name_that_is_the_base_models_on_one_server_is_not_served_there(
    make_api: Callable[..., Api], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = make_api(allowed=[folder]), make_api(allowed=[folder])
    two.served.service.base_model = "prod"  # as by --served-model-name
    load(one, "prod", folder / "v0")
    follow(two)
    assert "prod" not in folders_of(two)
    assert any("is the name of the base model" in text for text in caplog.messages)
    start(two)
    assert one.served.service.registry.names() == ["prod"]


def test_a_server_with_other_folders_takes_nothing_from_those_that_run(
    make_api: Callable[..., Api], folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    for name, seed in (("v0", 50), ("mine", 51)):
        write_adapter(other / name, seed=seed)
    one, two = make_api(allowed=[folder]), make_api(allowed=[folder, other])
    assert start(one, folder).notes == ()
    report = start(two, other)
    [note] = report.notes
    assert f"skipped {other / 'v0'}: the name 'v0' is {folder / 'v0'}, which another server" in note
    assert folders_of(two) == {"v0": "v0", "v1": "v1", "v2": "v2", "v3": "v3", "mine": "mine"}
    assert info(two, "v0")["version"] == info(one, "v0")["version"]
    follow(one)
    assert sorted(folders_of(one)) == ["v0", "v1", "v2", "v3"], "the other's folder is not open here"
    two.served.service.registry.close()
    assert start(one, folder).notes == ()
    assert one.served.service.registry.names() == ["v0", "v1", "v2", "v3"], "nobody else serves `mine`"


def test_files_that_changed_in_a_folder_of_both_are_followed_after_a_restart_of_one(
    make_api: Callable[..., Api], folder: Path
) -> None:
    one, two = make_api(allowed=[folder]), make_api(allowed=[folder])
    for api in (one, two):
        assert start(api, folder).notes == ()
    write_adapter(folder / "v0", seed=60)
    start(one, folder)
    follow(two)
    assert info(two, "v0")["version"] == info(one, "v0")["version"]


def test_what_changed_while_a_server_started_is_followed(
    make_api: Callable[..., Api], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make_api(allowed=[folder]), make_api(allowed=[folder])
    load(one, "old", folder / "v0")
    adopt = two.served.service.adopt

    async def change_meanwhile(adapter: Any) -> None:
        await adopt(adapter)
        if adapter.name == "old":
            await asyncio.to_thread(lambda: (unload(one, "old"), load(one, "v2", folder / "v3")))

    monkeypatch.setattr(two.served.service, "adopt", change_meanwhile)
    start(two, folder)
    follow(two)
    expected = {"v0": "v0", "v1": "v1", "v2": "v3", "v3": "v3"}
    assert folders_of(two) == expected
    follow(one)
    assert expected.items() <= folders_of(one).items()


def test_the_watch_follows_and_looks_no_further_while_nothing_changes(
    fronts: tuple[Api, Api], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fronts
    service, num_reads = two.served.service, 0
    read = service.registry.states
    looked = asyncio.Event()
    pause = asyncio.sleep

    def states() -> Any:
        nonlocal num_reads
        num_reads += 1
        return read()

    async def short_pause(seconds: float) -> None:
        looked.set()
        await pause(0)

    async def scenario() -> None:
        watching = asyncio.create_task(RegistryWatch(service.follower).run())
        await looked.wait()
        before = num_reads
        for _ in range(20):
            looked.clear()
            await looked.wait()
        assert num_reads == before
        await asyncio.to_thread(lambda: load(one, "bot", folder / "v1", load_inplace=True))
        while shown_by(service) != "v1":
            looked.clear()
            await looked.wait()
        watching.cancel()

    def shown_by(service: Any) -> str:
        return str(service.find("bot").spec.path.name)

    monkeypatch.setattr(service.registry, "states", states)
    monkeypatch.setattr("loraplex.server.registry_watch.asyncio.sleep", short_pause)
    two.run(scenario())


def test_a_base_model_that_is_given_by_another_name_is_said(tmp_path: Path) -> None:
    def notes(base_model: str) -> list[str]:
        with closing(AdapterRegistry(tmp_path, base_model)) as registry:
            return [*shared_state_note(registry, tmp_path), *namesake_notes(registry, tmp_path)]

    with closing(AdapterRegistry(tmp_path, "/models/m@shape")):
        [note] = notes("/models/m@shape")
        assert f"another server (process {os.getpid()}) uses the state folder" in note
        [note] = notes("org/m@shape")
        assert "same shape as '/models/m'" in note
        assert "give both the same --model" in note
        assert notes("org/m@another") == []
    assert notes("org/m@shape") == []


def test_a_damaged_entry_is_said_once_and_the_others_are_followed(
    fronts: tuple[Api, Api], folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fronts
    load(one, "broken", folder / "v1")
    load(one, "fine", folder / "v2")
    one.served.service.registry._connection.execute("UPDATE adapters SET spec = '?' WHERE name = 'broken'")
    pause, num_looks = asyncio.sleep, 0

    async def short_pause(seconds: float) -> None:
        nonlocal num_looks
        num_looks += 1
        await pause(0)

    async def scenario() -> None:
        watching = asyncio.create_task(RegistryWatch(two.served.service.follower).run())
        while two.served.service.version_of("fine") is None or num_looks < 50:
            await pause(0)
        watching.cancel()

    monkeypatch.setattr("loraplex.server.registry_watch.asyncio.sleep", short_pause)
    two.run(scenario())
    assert sum("the entry of adapter 'broken' is damaged" in text for text in caplog.messages) == 1
    assert two.served.service.version_of("broken") is None


def refuse_all_but(api: Api, patch: pytest.MonkeyPatch, *taken: str) -> None:
    """Have a server's engine refuse all adapters except those from folders of these names."""
    add_adapter = api.served.engine.add_adapter

    async def add(spec: Any) -> None:
        if spec.path.name not in taken:
            raise AdapterError(f"{spec.path.name} is refused; start it with --max-lora-rank 64")
        await add_adapter(spec)

    patch.setattr(api.served.engine, "add_adapter", add)


def test_what_was_left_out_does_not_undo_what_the_other_server_has_made_of_it(
    fronts: tuple[Api, Api], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fronts
    service = two.served.service
    with monkeypatch.context() as patch:
        refuse_all_but(two, patch)
        start(two)
    assert list(service.left_out) == ["bot"]
    assert load(one, "bot", folder / "v1", load_inplace=True).status_code == 200
    with monkeypatch.context() as patch:
        refuse_all_but(two, patch, "v0")
        for _ in range(2):
            two.run(retry_left_out(service))
        assert (registered(one), folders_of(two)) == (("v1", None, ["v0"]), {})
        assert service.left_out["bot"].reason.startswith("v1 is refused")
    follow(two, again=True)
    assert (registered(one), folders_of(two), service.left_out) == (("v1", None, ["v0"]), {"bot": "v1"}, {})


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_server_whose_engine_refuses_a_canary_leaves_it_on_trial(
    fronts: tuple[Api, Api],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_left_out: bool,
) -> None:
    one, two = fronts
    assert load(one, "bot", folder / "v1", canary_share=0.3).status_code == 200
    if is_left_out:
        with monkeypatch.context() as patch:
            refuse_all_but(two, patch)
            start(two)
        refuse_all_but(two, monkeypatch, "v0")
        two.run(retry_left_out(two.served.service))
    else:
        refuse_all_but(two, monkeypatch, "v0")
        [note] = start(two).notes
        assert "is not served here, and is tried again from time to time: v1 is refused" in note
    follow(one)
    follow(two, again=True)
    assert shown(one) == registered(one) == ("v0", "v1", [])
    assert shown(two) == ("v0", None, [])

    async def refuse(spec: Any) -> None:
        raise AdapterError("its disk is full")

    monkeypatch.setattr(two.served.engine, "add_adapter", refuse)
    follow(two, again=True)
    assert re.search(r"it still cannot be served as it is registered: .*its disk is full", caplog.text)
    assert "changed through another server" not in caplog.text, "nobody has since"
    monkeypatch.undo()
    follow(two, again=True)
    assert shown(two) == ("v0", "v1", [])


def test_a_trial_is_ended_through_a_server_whose_engine_refuses_the_canary(
    fronts: tuple[Api, Api], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fronts
    assert load(one, "bot", folder / "v1", canary_share=0.3).status_code == 200
    refuse_all_but(two, monkeypatch, "v0")
    start(two)
    assert change(two, "abort").status_code == 200
    follow(one)
    assert shown(one) == shown(two) == registered(one) == ("v0", None, [])
    assert change(two, "abort").status_code != 200  # there is none any more


def test_a_canary_that_only_one_of_two_servers_can_read_stays_on_trial(
    fronts: tuple[Api, Api], make_api: Callable[..., Api], folder: Path, tmp_path: Path
) -> None:
    one, _ = fronts
    assert load(one, "bot", folder / "v1", canary_share=0.3).status_code == 200
    closed = make_api(allowed=[folder / "v0"])
    [note] = start(closed).notes
    assert "is not served here" in note
    follow(one)
    assert (shown(one), shown(closed)) == (("v0", "v1", []), ("v0", None, []))


@pytest.mark.parametrize("verb", ["canary", "rollback", "promote"])
def test_a_server_that_could_not_follow_undoes_nothing_by_a_change_of_its_own(
    fronts: tuple[Api, Api], folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    one, two = fronts
    assert load(one, "bot", folder / "v1", load_inplace=True).status_code == 200
    assert change(one, "rollback").status_code == 200
    follow(two)
    assert load(one, "bot", folder / "v2", load_inplace=True).status_code == 200
    refuse_all_but(two, monkeypatch, "v0", "v1")
    is_load = verb == "canary"
    answer = load(two, "bot", folder / "v1", canary_share=0.5) if is_load else change(two, verb)
    assert answer.status_code == 409
    assert "another server has changed the adapter 'bot', and this one could not follow" in answer.text
    assert registered(one)[0] == "v2"
