"""The clients that may change adapters and see where files are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from server_fixtures import Api, Served, live, write_adapter

from loraplex.core.errors import EngineDeadError
from loraplex.server.errors import describe

BODY = {"lora_name": "one", "lora_path": "one"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "open" / "one")
    return tmp_path / "open"


def load(api: Api, key: str | None = None, **options: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return api.post("/v1/load_lora_adapter", BODY, headers=headers, **options)


def unload(api: Api, key: str | None = None, **options: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return api.post("/v1/unload_lora_adapter", {"lora_name": "pirate"}, headers=headers, **options)


def shows_paths(api: Api, key: str | None = None, **options: object) -> bool:
    """Return whether both lists have paths; it must not differ within one, or between them."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= options.pop("headers", {})  # type: ignore[arg-type]
    models = api.get("/v1/models", headers=headers, **options).json()["data"]
    adapters = api.get("/v1/adapters", headers=headers, **options).json()["data"]
    shown = {model["root"] is not None for model in models} | {each["path"] is not None for each in adapters}
    [only] = shown
    return only


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "127.3.2.1"])
def test_without_an_admin_key_this_machine_changes_adapters(
    make_api: Callable[..., Api], folder: Path, peer: str
) -> None:
    api = make_api(allowed=[folder])
    assert load(api, peer=peer).status_code == 200
    assert unload(api, peer=peer).status_code == 200
    assert shows_paths(api, peer=peer)


@pytest.mark.parametrize("peer", ["10.0.0.7", "::ffff:10.0.0.7", "2001:db8::1", "testclient"])
def test_without_an_admin_key_others_change_nothing(
    make_api: Callable[..., Api], folder: Path, peer: str
) -> None:
    api = make_api(allowed=[folder])
    for answer in (load(api, peer=peer), unload(api, peer=peer), load(api, "guess", peer=peer)):
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "admin_only"
        assert "--admin-key" in answer.json()["error"]["message"]
    assert "pirate" in {adapter.name for adapter in api.served.service.served()}
    assert not shows_paths(api, peer=peer)


@pytest.mark.parametrize(
    "header", ["X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Forwarded", "Via"]
)
def test_a_proxy_on_this_machine_is_not_this_machine(
    make_api: Callable[..., Api], folder: Path, header: str
) -> None:
    api = make_api(allowed=[folder])
    body = {"lora_name": "pirate"}
    answer = api.post("/v1/unload_lora_adapter", body, headers={header: "127.0.0.1"})
    assert answer.status_code == 403
    assert not shows_paths(api, headers={header: "127.0.0.1"})


def test_the_peer_is_not_what_a_header_says(make_served: Callable[..., Served]) -> None:
    with live(make_served()) as url:
        body = {"lora_name": "pirate"}
        spoofed = {"X-Forwarded-For": "127.0.0.1"}
        assert httpx.post(f"{url}/v1/unload_lora_adapter", json=body, headers=spoofed).status_code == 403
        assert httpx.post(f"{url}/v1/unload_lora_adapter", json=body).status_code == 200


def test_with_an_admin_key_its_holder_alone_changes_adapters(
    make_api: Callable[..., Api], folder: Path
) -> None:
    api = make_api(allowed=[folder], admin_keys=("root",))
    refused = load(api)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert load(api, "guess").status_code == 403
    assert not shows_paths(api)
    assert api.get("/v1/models", peer="10.0.0.7").status_code == 200
    assert load(api, "root", peer="10.0.0.7").status_code == 200
    assert unload(api, "root", peer="10.0.0.7").status_code == 200
    assert shows_paths(api, "root", peer="10.0.0.7")


def test_an_admin_key_is_an_api_key_and_not_the_reverse(make_api: Callable[..., Api], folder: Path) -> None:
    api = make_api(allowed=[folder], admin_keys=("root",), api_keys=("user",))
    assert load(api).status_code == 401
    assert load(api, "guess").status_code == 401
    refused = load(api, "user")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
    assert not shows_paths(api, "user")
    assert load(api, "root").status_code == 200
    assert shows_paths(api, "root")


def test_an_api_key_alone_does_not_make_a_stranger_an_administrator(
    make_api: Callable[..., Api], folder: Path
) -> None:
    api = make_api(allowed=[folder], api_keys=("user",))
    assert load(api, "user", peer="10.0.0.7").status_code == 403
    assert not shows_paths(api, "user", peer="10.0.0.7")
    assert load(api, peer="127.0.0.1").status_code == 401
    assert load(api, "user", peer="127.0.0.1").status_code == 200


def test_the_openai_client_reads_a_list_without_paths(make_served: Callable[..., Served]) -> None:
    with (
        live(make_served(admin_keys=("root",))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        models = client.models.list().data
        assert [(model.id, model.root) for model in models] == [  # type: ignore[attr-defined]
            ("base", None),
            ("pirate", None),
            ("poet", None),
        ]


@pytest.mark.parametrize("path", ["/models/secret/config.json", "~/models/x", "../models/x/", "/mnt/a/b"])
def test_why_an_engine_died_is_told_without_paths(path: str) -> None:
    error = EngineDeadError(
        f"the engine died ({path} cannot be read: gone); and '{path}': see 3/4 and HTTP/1.1"
    )
    message = describe(error).detail.message
    assert "models" not in message
    assert "mnt" not in message
    assert message.startswith("the engine died (")
    assert message.endswith("see 3/4 and HTTP/1.1")
