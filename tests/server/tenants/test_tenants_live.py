"""Tenants of a real fleet, by the official client and the command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import tiny
from server_process import serving, wait_until
from serving_fakes import hf_tokenizer

from loraplex.server.tenants.tenants_edit import add_tenant

pytestmark = pytest.mark.slow

PROMPT = "the dog and the cat went out and the dog came back " * 4


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, dict[str, str]]]:
    folder: Path = tmp_path_factory.mktemp("base")
    base = tiny.save_model(folder, vocab_size=448)
    hf_tokenizer().save_pretrained(folder)
    for name in ("acme-chat", "globex-chat"):
        tiny.save_adapter(folder / "adapters" / name, base, rank=4)
    path = folder / "tenants.toml"
    keys = {
        "acme": add_tenant(path, "acme", {"adapters": ["acme-*"], "requests_per_minute": 100}),
        "globex": add_tenant(path, "globex", {"adapters": ["globex-*"]}),
        "ops": add_tenant(path, "ops", {"operator": True}),
    }
    options = ["--adapters", str(folder / "adapters"), "--state-dir", str(tmp_path_factory.mktemp("state"))]
    options += ["--replicas", "2", "--routing", "round-robin", "--tenants", str(path)]
    with serving(folder, *options, command="fleet serve") as (_, url, _):
        yield url, path, keys


def client_of(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_prefixes_are_cached_for_each_tenant_alone(fleet: tuple[str, Path, dict[str, str]]) -> None:
    url, _, keys = fleet
    cached = []
    for name in ("acme", "acme", "acme", "globex", "globex", "globex", "ops", "acme"):
        with client_of(url, keys[name]) as client:
            answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(bool(answer.usage.prompt_tokens_details.cached_tokens))
    # There are two replicas, each with a cache of its own.
    assert cached == [False, False, True, False, False, True, False, True]


def test_a_fleet_shows_its_replicas_to_operators_alone(fleet: tuple[str, Path, dict[str, str]]) -> None:
    url, _, keys = fleet
    with client_of(url, keys["acme"]) as client:
        assert [model.id for model in client.models.list()] == ["tiny", "acme-chat"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="globex-chat", prompt="x")
    answers = {
        (name, method, path): httpx.request(
            method, url + path, headers={"Authorization": f"Bearer {keys[name]}"}, json=body
        )
        for name in ("acme", "ops")
        for method, path, body in (
            ("GET", "/v1/fleet", None),
            ("GET", "/v1/fleet/placement", None),
            ("PUT", "/v1/fleet/placement", {"replicas": [0, 1], "adapters": []}),
            ("DELETE", "/v1/fleet/placement", None),
            ("POST", "/v1/fleet/undrain", {"replica": 0}),
        )
    }
    for (name, method, _), answer in answers.items():
        if name == "ops":
            assert answer.status_code < 403
            continue
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_only")
        lacks = (
            "may not see this" if method == "GET" else "may not change replicas or where adapters are placed"
        )
        assert lacks in answer.json()["error"]["message"]


def test_a_server_reads_the_file_again_while_it_serves(fleet: tuple[str, Path, dict[str, str]]) -> None:
    url, path, keys = fleet
    late = add_tenant(path, "late", {})
    operator = {"Authorization": f"Bearer {keys['ops']}"}
    changes = re.compile(r"^loraplex:tenants_file_changes_total (\d+)$", re.MULTILINE)

    def is_in_force() -> bool:
        found = changes.search(httpx.get(f"{url}/metrics", headers=operator).text)
        return found is not None and int(found[1]) == 1

    wait_until(is_in_force, "the changed file")
    with client_of(url, late) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).usage is not None
