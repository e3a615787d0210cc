"""Adapters of a store that speaks S3: given when a server starts, and loaded over HTTP by a tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import tiny
from s3_store import Bucket, s3_store, use_store
from server_fixtures import SHAPE, Api, stored, write_adapter
from server_process import complete, serving
from serving_fakes import hf_tokenizer

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.remote import AllowedSources, parse_remote
from loraplex.server.adapter_choice import GivenAdapter
from loraplex.server.adapter_startup import start_adapters
from loraplex.server.remote_adapters import RemoteAdapters
from loraplex.server.tenants.tenants_edit import add_tenant

ACME = {"Authorization": "Bearer acme"}
OF_ACME = "s3://models/acme/*"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    with s3_store() as url:
        use_store(url, monkeypatch, tmp_path)
        yield Bucket(url)


def test_a_tenant_loads_from_its_part_of_a_bucket(
    make_api: Callable[..., Api], bucket: Bucket, tmp_path: Path
) -> None:
    own, private = write_adapter(tmp_path / "own", seed=1), write_adapter(tmp_path / "private", seed=2)
    bucket.put(own, "acme/own")
    bucket.put(private, "private/sql")
    rights = f'adapters = ["acme-*"]\nadministers = ["acme-*"]\nload_from = ["{OF_ACME}"]'
    tenants = f"[tenants.acme]\nkeys = [{stored('acme')}]\n{rights}"
    api = make_api(tenants=tenants, names=(), remote=RemoteAdapters(AllowedSources(["s3://models/*"])))
    source = parse_remote("s3://models/private/sql")
    assert source is not None
    api.run(start_adapters(api.served.service, (), (GivenAdapter(name="sql", source=source),)))

    def load(name: str, path: str) -> httpx.Response:
        return api.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, headers=ACME)

    refused = load("acme-sql", "s3://models/private/sql")
    assert refused.status_code == 403
    assert "`load_from`" in refused.json()["error"]["message"]
    assert load("acme-none", "s3://models/acme/none").status_code == 400
    assert load("acme-own", "s3://models/acme/own").status_code == 200
    found = {each.name: each.spec.version for each in api.served.service.served()}
    folders = {"sql": private, "acme-own": own}
    assert found == {name: read_adapter(path, SHAPE).version for name, path in folders.items()}


@pytest.mark.slow
def test_a_server_serves_adapters_of_a_store(bucket: Bucket, tmp_path: Path) -> None:
    """They answer as the same adapters do from folders."""
    folder = tmp_path / "base"
    base = tiny.save_model(folder, vocab_size=400)
    hf_tokenizer().save_pretrained(folder)
    for seed, name in enumerate(("sql", "acme-two"), start=1):
        tiny.save_adapter(tmp_path / "local" / name, base, rank=4, seed=seed)
        bucket.put(tmp_path / "local" / name, f"{name.partition('-')[0]}/{name}")
    tenants = tmp_path / "tenants.toml"
    rights = {"adapters": ["sql", "acme-*"], "administers": ["acme-*"], "load_from": [OF_ACME]}
    acme, ops = add_tenant(tenants, "acme", rights), add_tenant(tenants, "ops", {"operator": True})
    options = ["--adapter", "sql=s3://models/sql/sql", "--tenants", str(tenants)]
    options += ["--state-dir", str(tmp_path / "state"), "--allow-adapter-dir", str(tmp_path / "local")]
    options += ["--allow-adapter-repo", "s3://models/*"]

    def load(url: str, key: str, name: str, path: str) -> int:
        body = {"lora_name": name, "lora_path": path}
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=headers, timeout=60).status_code

    def answers(url: str, key: str, *names: str) -> list[str]:
        return [complete(url, name, key) for name in names]

    with serving(folder, *options) as (_, url, _):
        assert load(url, acme, "acme-two", "s3://models/acme/acme-two") == 200
        assert load(url, acme, "acme-sql", "s3://models/sql/sql") == 403
        for name in ("sql", "acme-two"):
            assert load(url, ops, f"local-{name}", str(tmp_path / "local" / name)) == 200
        found = answers(url, acme, "sql", "acme-two")
        assert found == answers(url, ops, "local-sql", "local-acme-two")
        assert len({*found, *answers(url, ops, "tiny")}) == 3
    with serving(folder, *options) as (_, url, _):
        assert answers(url, acme, "sql", "acme-two") == found
