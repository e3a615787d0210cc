"""Stage, canary, promote, abort, roll back: the application with a real registry and a fake engine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_calls import load, unload
from server_fixtures import USER, Api, events, write_adapter

from loraplex.adapters.rollout import MAX_PREVIOUS, takes_canary
from loraplex.adapters.spec import WEIGHTS_FILE
from loraplex.core.errors import AdapterError, EngineDeadError, LoraplexError
from loraplex.server import adapter_service
from loraplex.server.adapter_startup import start_adapters

HEADER = "x-loraplex-adapter-version"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is open for loading, with the versions v0 to v7 of an adapter."""
    for seed in range(8):
        write_adapter(tmp_path / "open" / f"v{seed}", seed=seed)
    return tmp_path / "open"


@pytest.fixture
def api(make_api: Callable[..., Api], folder: Path) -> Api:
    api = make_api(allowed=[folder])
    assert load(api, "bot", folder / "v0").status_code == 200
    return api


def change(api: Api, verb: str, name: str = "bot", **fields: Any) -> httpx.Response:
    return api.post(f"/v1/{verb}_lora_adapter", {"lora_name": name, **fields})


def info(api: Api, name: str = "bot") -> dict[str, Any]:
    return next(each for each in api.get("/v1/adapters").json()["data"] if each["name"] == name)


def shown(api: Api) -> tuple[str, str | None, list[str]]:
    """Return the folders of the stable version, of the canary and of the previous ones."""
    found = info(api)
    canary = found["canary"]
    return (
        Path(found["path"]).name,
        None if canary is None else Path(canary["path"]).name,
        [Path(each["path"]).name for each in found["previous"]],
    )


def registered(api: Api) -> tuple[str, str | None, list[str]]:
    """Return the same from the registry."""
    entry = api.served.service.registry.get("bot")
    assert entry is not None
    canary = entry.rollout.canary
    return (
        entry.spec.path.name,
        None if canary is None else canary.ref.path.name,
        [ref.path.name for ref in entry.rollout.previous],
    )


def restart(api: Api, *folders: Path) -> tuple[str, ...]:
    """Do what a new process on the same state folder does; return its notes."""
    api.served.service._served.clear()
    api.served.engine.adapters.clear()
    return tuple(api.run(start_adapters(api.served.service, folders)).notes)


def ask(api: Api, request_id: str = "r", **fields: Any) -> httpx.Response:
    body = {"model": "bot", "messages": USER, **fields}
    response = api.post("/v1/chat/completions", body, headers={"X-Request-Id": request_id})
    assert response.status_code == 200, response.text
    return response


def message(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


def test_a_reload_is_staged_and_a_first_load_is_not(api: Api, folder: Path) -> None:
    assert api.served.engine.staged == []
    answer = load(api, "bot", folder / "v1", load_inplace=True)
    assert api.served.engine.staged == [answer.headers[HEADER]]
    assert shown(api) == registered(api) == ("v1", None, ["v0"])


FAILURES = [
    (AdapterError("its weights file ends too early"), 400, "ends too early"),
    (LoraplexError("out of luck"), 500, "out of luck"),
    (EngineDeadError("the engine process died"), 503, "the engine process died"),
]


@pytest.mark.parametrize(("failure", "status", "words"), FAILURES)
@pytest.mark.parametrize("how", [{"load_inplace": True}, {"canary_share": 0.5}])
def test_a_failed_stage_leaves_the_old_version_serving(
    api: Api, folder: Path, failure: Exception, status: int, words: str, how: dict[str, Any]
) -> None:
    old = info(api)["version"]
    api.served.engine.stage_failure = failure
    found = message(load(api, "bot", folder / "v1", **how), status)
    assert words in found
    assert f"'bot' stays with version {old[:12]}" in found
    assert shown(api) == registered(api) == ("v0", None, [])
    assert ask(api).headers[HEADER] == old
    assert api.served.engine.removed == api.served.engine.staged != [old]
    api.served.engine.stage_failure = None
    assert load(api, "bot", folder / "v1", **how).status_code == 200


def test_a_stage_that_takes_too_long_is_given_up(
    api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(version: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(api.served.engine, "stage_adapter", never)
    monkeypatch.setattr(adapter_service, "STAGE_TIMEOUT_S", 0.0)
    assert "try again when fewer requests wait" in message(
        load(api, "bot", folder / "v1", load_inplace=True), 503
    )
    assert shown(api) == registered(api) == ("v0", None, [])


def test_the_canary_answers_exactly_those_whose_hash_says_so(api: Api, folder: Path) -> None:
    stable = info(api)["version"]
    canary = load(api, "bot", folder / "v1", canary_share=0.3).headers[HEADER]
    assert shown(api) == registered(api) == ("v0", "v1", [])
    assert info(api)["canary"]["share"] == 0.3
    expected, found = [], []
    for number in range(60):
        request_id = f"request-{number}"
        expected.append(canary if takes_canary("bot", canary, 0.3, request_id) else stable)
        found.append(ask(api, request_id).headers[HEADER])
    assert found == expected
    assert 0 < found.count(canary) == info(api)["canary"]["requests"] < 60
    assert info(api)["requests"] == 60
    page = api.get("/metrics").text
    assert f'loraplex:adapter_canary_requests_total{{adapter="bot"}} {found.count(canary)}\n' in page
    assert 'loraplex:adapter_canary_share{adapter="bot"} 0.3\n' in page
    assert page.count("loraplex:adapter_canary_share{") == 1  # names without canary have no series of it
    for version in (stable, canary):
        assert f'loraplex:adapter_resident{{adapter="bot",tier="host",version="{version}"}} 1\n' in page


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
def test_a_user_sees_one_version(api: Api, folder: Path, field: str) -> None:
    load(api, "bot", folder / "v1", canary_share=0.5)
    seen = {
        user: {ask(api, f"r{number}", **{field: user}).headers[HEADER] for number in range(8)}
        for user in ("ada", "bob", "eve", "joe", "kim", "sue")
    }
    assert all(len(versions) == 1 for versions in seen.values())
    assert len(set.union(*seen.values())) == 2


def test_all_choices_and_prompts_of_a_request_are_of_one_version(api: Api, folder: Path) -> None:
    load(api, "bot", folder / "v1", canary_share=0.5)
    for number in range(10):
        api.served.engine.requests.clear()
        body = {"model": "bot", "prompt": ["a", "b"], "n": 3}
        headers = {"X-Request-Id": f"request-{number}"}
        answer = api.post("/v1/completions", body, headers=headers)
        assert {request.adapter for request in api.served.engine.requests} == {answer.headers[HEADER]}
        assert answer.json()["usage"]["adapter_version"] == answer.headers[HEADER]


def test_usage_names_the_version_in_streams_too_and_none_for_the_base(api: Api) -> None:
    version = info(api)["version"]
    assert ask(api).json()["usage"]["adapter_version"] == version
    streamed = ask(api, stream=True, stream_options={"include_usage": True})
    assert events(streamed)[-1]["usage"]["adapter_version"] == version
    assert "adapter_version" not in ask(api, model="base").json()["usage"]


def test_a_promoted_canary_answers_all(api: Api, folder: Path) -> None:
    canary = load(api, "bot", folder / "v1", canary_share=0.01).headers[HEADER]
    answer = change(api, "promote")
    assert (answer.status_code, answer.headers[HEADER]) == (200, canary)
    assert shown(api) == registered(api) == ("v1", None, ["v0"])
    assert {ask(api, f"r{number}").headers[HEADER] for number in range(10)} == {canary}
    assert list(api.served.engine.adapters) == ["version-of-pirate", "version-of-poet", canary]


def test_an_aborted_canary_is_gone(api: Api, folder: Path) -> None:
    stable = info(api)["version"]
    canary = load(api, "bot", folder / "v1", canary_share=0.99).headers[HEADER]
    assert change(api, "abort").status_code == 200
    assert shown(api) == registered(api) == ("v0", None, [])
    assert {ask(api, f"r{number}").headers[HEADER] for number in range(10)} == {stable}
    assert api.served.engine.removed == [canary]


def test_the_share_of_a_canary_can_be_changed(api: Api, folder: Path) -> None:
    for share in (0.1, 0.6):
        assert load(api, "bot", folder / "v1", canary_share=share).status_code == 200
        assert info(api)["canary"]["share"] == share
    assert shown(api) == registered(api) == ("v0", "v1", [])


def test_rolling_back_leads_through_the_versions_before(api: Api, folder: Path) -> None:
    for number in (1, 2):
        load(api, "bot", folder / f"v{number}", load_inplace=True)
    load(api, "bot", folder / "v3", canary_share=0.5)
    change(api, "promote")
    assert shown(api) == ("v3", None, ["v2", "v1", "v0"])
    for left in (["v1", "v0"], ["v0"], []):
        answer = change(api, "rollback")
        assert answer.status_code == 200
        assert shown(api)[2] == left
        assert answer.headers[HEADER] == ask(api).headers[HEADER] == info(api)["version"]
    assert shown(api) == registered(api) == ("v0", None, [])
    assert "no previous version" in message(change(api, "rollback"), 400)


def test_rolling_back_to_a_given_version(api: Api, folder: Path) -> None:
    first = info(api)["version"]
    for number in (1, 2):
        load(api, "bot", folder / f"v{number}", load_inplace=True)
    assert "give the first" in message(change(api, "rollback", version="nothing"), 400)
    assert "give the first" in message(change(api, "rollback", version=""), 400)
    assert change(api, "rollback", version=first[:8]).headers[HEADER] == first
    assert shown(api) == registered(api) == ("v0", None, [])


def test_only_the_last_versions_are_remembered(api: Api, folder: Path) -> None:
    for number in range(1, 8):
        load(api, "bot", folder / f"v{number}", load_inplace=True)
    assert shown(api) == registered(api) == ("v7", None, ["v6", "v5", "v4", "v3", "v2"])
    assert MAX_PREVIOUS == 5


def test_a_version_whose_files_changed_is_not_rolled_back_to(api: Api, folder: Path) -> None:
    load(api, "bot", folder / "v1", load_inplace=True)
    old = info(api)["previous"][0]["version"]
    write_adapter(folder / "v0", seed=99)
    found = message(change(api, "rollback"), 400)
    assert "have changed" in found
    assert "content hash" in found
    assert old[:12] in found
    shutil.rmtree(folder / "v0")
    found = message(change(api, "rollback"), 400)
    assert "cannot be read" in found
    assert "put its files back" in found
    assert shown(api) == registered(api) == ("v1", None, ["v0"])
    write_adapter(folder / "v0", seed=0)
    assert change(api, "rollback").headers[HEADER] == old


def test_files_cut_short_are_not_rolled_back_to(api: Api, folder: Path) -> None:
    load(api, "bot", folder / "v1", load_inplace=True)
    weights = folder / "v0" / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "cannot be read" in message(change(api, "rollback"), 400)
    assert shown(api) == ("v1", None, ["v0"])


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5])
def test_a_share_that_is_none_is_refused(api: Api, folder: Path, share: float) -> None:
    answer = load(api, "bot", folder / "v1", canary_share=share)
    assert "above 0 and below 1" in message(answer, 400)
    assert answer.json()["error"]["param"] == "canary_share"
    assert shown(api) == ("v0", None, [])


def test_what_cannot_be_is_refused_with_the_fix(api: Api, folder: Path) -> None:
    assert "load it without canary_share first" in message(
        load(api, "new", folder / "v1", canary_share=0.1), 400
    )
    assert "cannot be its own canary" in message(load(api, "bot", folder / "v0", canary_share=0.1), 400)
    for verb in ("promote", "abort"):
        assert f"no canary to {verb}" in message(change(api, verb), 400)
        assert "is not loaded" in message(change(api, verb, "nobody"), 404)
        assert "is the base model" in message(change(api, verb, "base"), 400)
    assert "is not loaded" in message(change(api, "rollback", "nobody"), 404)
    load(api, "bot", folder / "v1", canary_share=0.1)
    for answer in (
        change(api, "rollback"),
        load(api, "bot", folder / "v2", load_inplace=True),
        load(api, "bot", folder / "v2", canary_share=0.1),
    ):
        assert "promote or abort it" in message(answer, 400)
    assert shown(api) == registered(api) == ("v0", "v1", [])


@pytest.mark.parametrize("second", ["promote", "abort", "rollback", "load", "unload"])
def test_of_two_changes_at_once_one_is_told(api: Api, folder: Path, second: str) -> None:
    load(api, "bot", folder / "v1", canary_share=0.5)

    async def scenario() -> None:
        gate = api.served.engine.add_gate = asyncio.Event()
        body = {"lora_name": "bot", "lora_path": str(folder / "v1")}
        share = {**body, "canary_share": 0.7}
        first = asyncio.create_task(api.send("POST", "/v1/load_lora_adapter", json=share))
        while not api.served.service.follower.is_changing("bot"):
            await asyncio.sleep(0)
        fields = {**body, "load_inplace": True} if second == "load" else {"lora_name": "bot"}
        answer = await api.send("POST", f"/v1/{second}_lora_adapter", json=fields)
        assert answer.status_code == 409
        assert "being changed by another call" in answer.json()["error"]["message"]
        gate.set()
        assert (await first).status_code == 200

    api.run(scenario())
    assert info(api)["canary"]["share"] == 0.7
    assert shown(api) == registered(api) == ("v0", "v1", [])


def test_a_request_keeps_the_canary_it_began_with(api: Api, folder: Path) -> None:
    canary = load(api, "bot", folder / "v1", canary_share=0.5).headers[HEADER]
    key = next(f"k{n}" for n in range(100) if takes_canary("bot", canary, 0.5, f"k{n}"))
    lease = api.served.service.lease("bot", key=key)
    assert (lease.version, lease.is_canary) == (canary, True)
    change(api, "abort")
    assert api.served.service.lease("bot", key=key).version != canary
    assert canary in api.served.engine.adapters

    async def end() -> None:
        lease.release()
        while canary in api.served.engine.adapters:
            await asyncio.sleep(0)

    api.run(end())


def test_an_unloaded_name_takes_its_canary_and_its_past_with_it(api: Api, folder: Path) -> None:
    load(api, "bot", folder / "v1", load_inplace=True)
    load(api, "bot", folder / "v2", canary_share=0.5)
    assert unload(api, "bot").status_code == 200
    assert set(api.served.engine.adapters) == {"version-of-pirate", "version-of-poet"}
    load(api, "bot", folder / "v0")
    assert shown(api) == registered(api) == ("v0", None, [])


def test_a_restart_keeps_canary_share_and_past(api: Api, folder: Path) -> None:
    load(api, "bot", folder / "v1", load_inplace=True)
    load(api, "bot", folder / "v2", canary_share=0.4)
    before = info(api)
    assert restart(api) == ()
    after = info(api)
    assert [after[key] for key in ("version", "canary", "previous")] == [
        before[key] for key in ("version", "canary", "previous")
    ]
    assert set(api.served.engine.adapters) == {before["version"], before["canary"]["version"]}
    assert change(api, "promote").status_code == 200
    assert change(api, "rollback").status_code == 200
    assert restart(api) == ()
    assert shown(api) == registered(api) == ("v1", None, ["v0"])


@pytest.mark.parametrize("harm", ["gone", "changed", "closed"])
def test_a_canary_that_cannot_be_served_after_a_restart_is_dropped_with_a_note(
    api: Api, folder: Path, tmp_path: Path, harm: str
) -> None:
    elsewhere = tmp_path / "open" / "elsewhere"
    write_adapter(elsewhere / "v1", seed=1)
    load(api, "bot", elsewhere / "v1", canary_share=0.25)
    if harm == "gone":
        shutil.rmtree(elsewhere)
    elif harm == "changed":
        write_adapter(elsewhere / "v1", seed=50)
    else:
        outside = tmp_path / "outside"
        elsewhere.rename(outside)
        elsewhere.symlink_to(outside)
    [note] = restart(api)
    assert "its canary, which had a share of 0.25, is gone" in note
    assert shown(api) == registered(api) == ("v0", None, [])


def test_a_trial_leaves_a_name_to_its_folder_and_a_promotion_takes_it(
    make_api: Callable[..., Api], tmp_path: Path, folder: Path
) -> None:
    api = make_api(allowed=[folder, tmp_path / "given"])
    write_adapter(tmp_path / "given" / "bot", seed=0)
    restart(api, tmp_path / "given")
    load(api, "bot", folder / "v1", canary_share=0.5)
    assert restart(api, tmp_path / "given") == ()
    assert shown(api) == registered(api) == ("bot", "v1", [])
    change(api, "abort")
    restart(api)  # without the folder, which the name came from
    assert api.served.service.served() == []

    restart(api, tmp_path / "given")
    load(api, "bot", folder / "v1", canary_share=0.5)
    change(api, "promote")
    [note] = restart(api, tmp_path / "given")
    assert "was loaded from" in note
    assert shown(api) == registered(api) == ("v1", None, ["bot"])
