"""Calls of the adapter administration, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from server_fixtures import Api


def load(api: Api, name: str, path: Path | str, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return api.post("/v1/load_lora_adapter", body)


def unload(api: Api, name: str) -> httpx.Response:
    return api.post("/v1/unload_lora_adapter", {"lora_name": name})


def version_of(api: Api, name: str) -> str:
    adapters = api.get("/v1/adapters").json()["data"]
    return next(adapter["version"] for adapter in adapters if adapter["name"] == name)
