"""The OpenAPI document against the server: whatever is sent, the server behaves as documented."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from openapi_calls import call_many
from schemathesis import GenerationMode
from server_fixtures import make_server, stored, write_adapter
from starlette.types import Receive, Scope, Send

from loraplex.server.web_guard import WebAccess

BODIES = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/promote_lora_adapter",
    "/v1/abort_lora_adapter",
    "/v1/rollback_lora_adapter",
    "/tokenize",
    "/detokenize",
    "/v1/batches",
    "/v1/files",
]
READS = [
    *("/v1/models", "/v1/adapters", "/v1/demand", "/v1/overview", "/v1/tenants", "/version", "/metrics"),
    *("/health", "/health/ready", "/health/live", "/v1/files", "/v1/batches"),
]
BY_ID = [
    *(("GET", path) for path in ("/v1/models/{model_id}", "/v1/files/{file_id}", "/v1/batches/{batch_id}")),
    ("GET", "/v1/files/{file_id}/content"),
    ("DELETE", "/v1/files/{file_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
]
CALLS_PER_BODY = 16
MANY_CALLS = 10_000
RULED = {"adapter_id", "tools", "tool_choice", "response_format"}


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    """Yield the document of two servers that take turns: one for everybody, and one with tenants."""
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder) / "adapters" / "one")
        # The test client calls itself by these names.
        web = WebAccess(allowed_hosts=("testserver",))
        allowed = [Path(folder) / "adapters"]
        plain = make_server(Path(folder) / "plain", allowed=allowed, web=web)
        rights = f'adapters = ["p*"]\nadministers = ["*"]\nload_from = ["{allowed[0]}"]'
        tenants = f"[tenants.acme]\nkeys = [{stored('key')}]\n{rights}\ntokens_per_minute = 1000000000"
        shared = make_server(Path(folder) / "shared", allowed=allowed, web=web, tenants=tenants)
        turns = cycle([plain, shared])

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            has_twin = scope.get("path") not in ("/openapi.json", "/v1/tenants")
            served = next(turns) if has_twin else shared
            others = [header for header in scope["headers"] if header[0] != b"authorization"]
            headers = [*others, (b"authorization", b"Bearer key")] if served is shared else scope["headers"]
            await served.app({**scope, "client": ("127.0.0.1", 1), "headers": headers}, receive, send)

        yield schemathesis.openapi.from_asgi("/openapi.json", app)
        plain.service.registry.close()
        shared.service.registry.close()


def write_as_callers_do(body: dict[str, Any]) -> None:
    """Let a body keep the rules that no schema expresses: whole numbers without a fraction, messages that any
    template knows, and neither grammars nor names of adapters of random letters."""
    for name, value in list(body.items()):
        if name in RULED or name.startswith("guided_"):
            del body[name]
        elif isinstance(value, float) and value.is_integer():
            body[name] = int(value)
    if isinstance(messages := body.get("messages"), list):
        contents = [each.get("content") or "text" for each in messages[:2]]
        body["messages"] = [{"role": "user", "content": content} for content in contents]


class Callers:
    """Gives bodies the served model, as no random name would get past its lookup, and lets most of them keep
    the rules that no schema expresses."""

    def __init__(self) -> None:
        self._num_bodies = 0

    def __call__(self, body: dict[str, Any]) -> None:
        if "model" in body:
            self._num_bodies += 1
            body["model"] = "base"
            if self._num_bodies % 3:
                write_as_callers_do(body)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", BODIES)
def test_any_body_is_answered_as_documented(schema: Any, path: str, mode: GenerationMode) -> None:
    check_bodies(schema, path, mode, CALLS_PER_BODY)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", BODIES)
def test_ten_thousand_bodies_are_answered_as_documented(schema: Any, path: str, mode: GenerationMode) -> None:
    check_bodies(schema, path, mode, ceil(MANY_CALLS / (len(BODIES) * len(GenerationMode))))


def check_bodies(schema: Any, path: str, mode: GenerationMode, num_calls: int) -> None:
    statuses = call_many(schema[path]["POST"], mode, num_calls, Callers())
    assert sum(statuses.values()) >= num_calls
    if mode is GenerationMode.NEGATIVE:
        assert 200 not in statuses
    elif path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        assert statuses[200] > num_calls // 10


@pytest.mark.parametrize("path", READS)
def test_every_page_is_as_documented(schema: Any, path: str) -> None:
    statuses = set(call_many(schema[path]["GET"], GenerationMode.POSITIVE, 5))
    assert statuses <= ({200, 403} if path == "/v1/demand" else {200})


@pytest.mark.parametrize("num_calls", [10, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "path"), BY_ID)
def test_any_id_is_answered_as_documented(schema: Any, method: str, path: str, num_calls: int) -> None:
    statuses = call_many(schema[path][method], GenerationMode.POSITIVE, num_calls)
    assert statuses[404] > 0


def test_every_operation_is_covered(schema: Any) -> None:
    documented = {operation.ok().label for operation in schema.get_all_operations()}
    covered = [*(("POST", path) for path in BODIES), *(("GET", path) for path in READS), *BY_ID]
    assert documented == {f"{method} {path}" for method, path in covered}
