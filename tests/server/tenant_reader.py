"""A tenant that reads all that a server answers, to find what is about others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from server_fixtures import USER, Api, stored

NAMES = ("acme-chat", "acme-code", "globex-chat", "globex-secret", "shared-poet")
OTHERS = ("globex-chat", "globex-secret", "globex", "ops")
"""Names that acme must never read."""


def tenants_file(folder: Path | str = "/srv", **more: str) -> str:
    tables = {
        "acme": f'adapters = ["acme-*", "shared-*"]\nadministers = ["acme-*"]\nload_from = ["{folder}/acme"]',
        "globex": 'adapters = ["globex-*", "shared-*"]\nbase_model = false',
        "ops": "operator = true",
        "prometheus": "metrics = true\nbase_model = false",
    }
    return "\n".join(
        f"[tenants.{name}]\nkeys = [{stored(name + '-key')}]\n{text}\n{more.get(name, '')}"
        for name, text in tables.items()
    )


def as_tenant(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-key"}


def chat(api: Api, name: str, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": USER, **fields}
    return api.post("/v1/chat/completions", body, headers=as_tenant(name))


def all_answers(
    api: Api, name: str, tmp_path: Path, is_asked: Callable[[str], bool] = lambda path: True
) -> list[tuple[str, httpx.Response]]:
    """Return the answers of every route to a tenant, to good and bad requests, by what was asked.
    `is_asked`: chooses among the routes."""
    key = as_tenant(name)
    models = (
        "base",
        "acme-chat",
        "acme-cha",
        "globe-chat",
        "secret",
        "shared-poe",
        "base:globe-chat",
        "",
        "*",
    )
    bodies: list[dict[str, Any]] = [
        *({"model": model, "messages": USER, "max_tokens": 2} for model in models),
        *({"model": model, "messages": USER, "max_tokens": 2, "stream": True} for model in models),
        *({"model": model, "prompt": "x", "max_tokens": 2, "n": 3, "logprobs": 1} for model in models),
        *({"model": model, "prompt": [1] * 5_000} for model in models),
        {"model": "acme-chat", "messages": USER, "nonsense": 1},
        {"lora_name": "acme-new", "lora_path": str(tmp_path / "acme" / "new")},
        {"lora_name": "acme-new", "lora_path": str(tmp_path / "globex" / "new")},
        {"lora_name": "acme-ne", "lora_path": "../globex/new"},
        {"lora_name": "acme-other", "lora_path": "new"},
        {"lora_name": "acme-other", "lora_path": "owner/repo"},
        {"lora_name": "acme-other", "lora_path": "acme/missing"},
        *({"lora_name": model, "lora_path": "x"} for model in models),
        *({"lora_name": model} for model in models),
        {"replica": 0}, {"replicas": 1}, {"replicas": [0], "adapters": []}, {},
    ]  # fmt: skip
    paths: dict[str, Any] = api.get("/openapi.json", headers=key).json()["paths"]
    found: list[tuple[str, httpx.Response]] = []
    for path, methods in paths.items():
        if not is_asked(path):
            continue
        for method in (*methods, "delete", "head", "options"):
            filled = [path.replace("{model_id}", model) for model in models] if "{" in path else [path]
            for url in filled:
                for body in bodies if method in ("post", "put") else [None]:
                    options = {} if body is None else {"json": body}
                    answer = api.request(method.upper(), url, headers=key, **options)
                    found.append((f"{method} {url} {json.dumps(body)[:80]}", answer))
    for url in ("/docs", "/nothing", "/v1/fleet", "/v1/fleet/placement", "/openapi.json"):
        found.append((url, api.get(url, headers=key)))
    return found


def check_answers(answers: list[tuple[str, httpx.Response]]) -> None:
    """Assert that none names anything of another tenant, or counts the requests of others."""
    for asked, answer in answers:
        read = answer.text + str(answer.headers)
        asked_itself = [name for name in OTHERS if name in asked]
        for name in OTHERS:
            assert name in asked_itself or name not in read, (asked, answer.text)
        assert "adapter_requests_total" not in read
