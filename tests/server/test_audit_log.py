"""The audit log: who changed adapters, or was refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from log_lines import Lines, listening
from server_fixtures import Api, write_adapter

from loraplex.core.errors import AdapterError, InvalidRequestError
from loraplex.fleet.plan import Entry
from loraplex.server.app import create_app
from loraplex.server.engine_status import Fleet


@pytest.fixture
def audit() -> Iterator[Lines]:
    yield from listening("loraplex.audit")


def test_the_changes_of_a_trial_are_audited(
    make_api: Callable[..., Api], tmp_path: Path, audit: Lines
) -> None:
    api = make_api(allowed=[tmp_path])
    for seed in (1, 2):
        write_adapter(tmp_path / str(seed), seed=seed)
    load: dict[str, Any] = {"lora_name": "sql", "lora_path": "1"}
    api.post("/v1/load_lora_adapter", load)
    first = audit.take()["new_version"]

    def changes(verb: str, body: dict[str, Any]) -> list[tuple[str, str | None, str | None]]:
        """Return message, old and new version of the lines about a change."""
        api.post(f"/v1/{verb}_lora_adapter", body)
        lines = [audit.take()]
        if lines[0]["message"] == "adapter stage":
            lines.append(audit.take())
        return [(line["message"], line.get("old_version"), line.get("new_version")) for line in lines]

    trial, name = {**load, "lora_path": "2", "canary_share": 0.5}, {"lora_name": "sql"}
    staged, begun = changes("load", trial)
    second = str(begun[2])
    assert second != first
    assert staged == ("adapter stage", first, second)
    assert begun == ("adapter canary", first, second)
    assert changes("abort", name) == [("adapter abort", second, first)]
    assert changes("promote", name) == [("adapter promote refused", first, None)]
    changes("load", trial)
    assert changes("promote", name) == [
        ("adapter stage", first, second),
        ("adapter promote", first, second),
    ]
    api.served.engine.stage_failure = AdapterError("its weights file ends too early")
    assert changes("rollback", name) == [("adapter rollback refused", second, None)]
    api.served.engine.stage_failure = None
    assert changes("rollback", name) == [
        ("adapter stage", second, first),
        ("adapter rollback", second, first),
    ]
    audit.assert_none()


def test_changes_of_adapters_are_audited(make_api: Callable[..., Api], tmp_path: Path, audit: Lines) -> None:
    api = make_api(allowed=[tmp_path / "open"], api_keys=("key",))
    one = str(write_adapter(tmp_path / "open" / "one"))
    two = str(write_adapter(tmp_path / "open" / "two", seed=2))
    headers = {"Authorization": "Bearer key", "X-Request-Id": "mine"}

    def load(name: str, path: str, **options: Any) -> dict[str, Any]:
        body = {"lora_name": name, "lora_path": path, **options}
        api.post("/v1/load_lora_adapter", body, headers=headers)
        return audit.take()

    loaded = load("sql", one)
    first = loaded.pop("new_version")
    assert loaded == {
        "level": "INFO",
        "message": "adapter load",
        "request_id": "mine",
        "adapter": "sql",
        "source": one,
        "result": "done",
        "seconds": 0.0,
        "client": "127.0.0.1",
        "key": "api",
    }
    again = load("sql", two)
    assert (again["message"], again["old_version"]) == ("adapter reload refused", first)
    assert "load_inplace" in again["reason"]
    staged = load("sql", two, load_inplace=True)
    reloaded = audit.take()
    assert (staged["message"], reloaded["message"]) == ("adapter stage", "adapter reload")
    assert staged["old_version"] == reloaded["old_version"] == first
    assert staged["new_version"] == reloaded["new_version"] != first
    closed = load("other", str(tmp_path))
    assert (closed["message"], closed["result"]) == ("adapter load refused", "refused")
    assert closed["reason"].startswith("PathNotAllowedError")
    signed = load("other", "https://me:secret@store/it?signature=secret")
    assert signed["source"] == "https://****@store/it?signature=****"
    assert "secret" not in signed["reason"]
    api.post("/v1/unload_lora_adapter", {"lora_name": "sql"}, headers=headers)
    unloaded = audit.take()
    assert (unloaded["message"], unloaded["old_version"]) == ("adapter unload", reloaded["new_version"])
    assert "new_version" not in unloaded
    api.served.engine.dead = True
    failed = load("sql", one)
    assert (failed["level"], failed["message"]) == ("WARNING", "adapter load failed")
    assert len(first) == 12


@pytest.mark.parametrize(
    ("options", "headers", "peer", "status", "reason"),
    [
        ({"api_keys": ("key",)}, {}, "127.0.0.1", 401, "UnauthorizedError"),
        ({"admin_keys": ("root",)}, {}, "127.0.0.1", 401, "UnauthorizedError"),
        ({"admin_keys": ("root",)}, {"Authorization": "Bearer guess"}, "127.0.0.1", 403, "ForbiddenError"),
        ({}, {}, "10.0.0.7", 403, "ForbiddenError"),
        ({}, {"Origin": "https://evil.example"}, "127.0.0.1", 403, "ForbiddenError"),
        ({}, {"Host": "evil.example"}, "127.0.0.1", 403, "ForbiddenError"),
    ],
)
@pytest.mark.parametrize("verb", ["load", "unload"])
def test_changes_by_those_who_may_not_are_audited(
    make_api: Callable[..., Api],
    audit: Lines,
    verb: str,
    options: dict[str, Any],
    headers: dict[str, str],
    peer: str,
    status: int,
    reason: str,
) -> None:
    api = make_api(**options)
    body = {"lora_name": "pirate"}
    response = api.post(f"/v1/{verb}_lora_adapter", body, headers=headers, peer=peer)
    assert response.status_code == status
    line = audit.take()
    assert line.pop("reason").startswith(f"{reason}: ")
    assert line == {
        "level": "INFO",
        "message": f"adapter {verb} refused",
        "request_id": response.headers["x-request-id"],
        "result": "refused",
        "seconds": 0.0,
        "client": peer,
    }
    api.get("/v1/models", headers=headers, peer=peer)
    api.get(f"/v1/{verb}_lora_adapter", headers=headers, peer=peer)
    audit.assert_none()


def test_a_change_that_cannot_be_read_is_audited(api: Api, audit: Lines) -> None:
    api.post("/v1/unload_lora_adapter", content=b"{")
    line = audit.take()
    assert (line["message"], "adapter" in line) == ("adapter unload refused", False)
    assert line["reason"].startswith("InvalidRequestError")


class TwoReplicas:
    """A fleet that has nothing to show, and of which one replica cannot be drained."""

    replicas: tuple[Any, ...] = ()
    has_placement = True

    def give(self, given: Mapping[str, Entry]) -> None:
        assert not given

    def placed_on(self, version: str) -> None:
        return None

    def waiting(self, version: str) -> list[int]:
        return []

    def num_bytes(self, version: str) -> int:
        return 0

    def drain(self, number: int, *, move: bool) -> None:
        if number == 0:
            raise InvalidRequestError("replica 0 is the last one that takes requests")

    async def scale(self, num_replicas: int, *, move: bool) -> None:
        pass


def test_changes_of_replicas_are_audited(make_api: Callable[..., Api], audit: Lines) -> None:
    made = make_api().served
    deps = replace(made.deps, fleet=cast(Fleet, TwoReplicas()))
    with closing(Api(replace(made, app=create_app(deps), deps=deps))) as api:
        assert api.post("/v1/fleet/drain", {"replica": 1, "move": True}).status_code == 200
        line = audit.take()
        assert (line["message"], line["replica"], line["move"]) == ("fleet drain", 1, True)
        assert line["request_id"]
        api.post("/v1/fleet/drain", {"replica": 0})
        line = audit.take()
        assert line["message"] == "fleet drain refused"
        assert "the last one that takes requests" in line["reason"]
        api.post("/v1/fleet/scale", {"replicas": 4})
        line = audit.take()
        assert (line["message"], line["replicas"], line["result"]) == ("fleet scale", 4, "done")
        given = {"replicas": [], "adapters": [{"lora_name": "poett", "replicas": [0]}]}
        refused = api.request("PUT", "/v1/fleet/placement", json=given)
        assert "'poett' (did you mean 'poet'?)" in refused.json()["error"]["message"]
        line = audit.take()
        assert (line["message"], line["adapters"]) == ("fleet placement refused", 1)
        api.request("DELETE", "/v1/fleet/placement")
        assert audit.take()["message"] == "fleet release placement"


def test_a_placement_is_changed_by_administrators_only(make_api: Callable[..., Api]) -> None:
    made = make_api(admin_keys=("secret",)).served
    deps = replace(made.deps, fleet=cast(Fleet, TwoReplicas()))
    with closing(Api(replace(made, app=create_app(deps), deps=deps))) as api:
        for method in ("PUT", "DELETE"):
            assert api.request(method, "/v1/fleet/placement", json={}).status_code == 401
            wrong = {"Authorization": "Bearer guess"}
            assert api.request(method, "/v1/fleet/placement", json={}, headers=wrong).status_code == 403
