"""The OpenAPI document against the server: whatever is sent, the server behaves as documented."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.python import asgi
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
CALLS_PER_BODY = 56
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


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


def call_many(operation: Any, mode: GenerationMode, num_calls: int) -> Counter[int]:
    """Call an operation with generated input and validate each answer; returns the statuses seen."""
    statuses: Counter[int] = Counter()
    with asgi.get_client(operation.app) as client:

        @settings(
            max_examples=num_calls,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "base"  # no random name would get past the lookup of the model
            response = case.call(session=client)
            case.validate_response(response, checks=CHECKS)
            statuses[response.status_code] += 1

        run()
    return statuses


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", BODIES)
def test_any_body_is_answered_as_documented(schema: Any, path: str, mode: GenerationMode) -> None:
    statuses = call_many(schema[path]["POST"], mode, CALLS_PER_BODY)
    assert sum(statuses.values()) >= CALLS_PER_BODY
    if mode is GenerationMode.NEGATIVE:
        assert 200 not in statuses
    elif path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        assert statuses[200] > CALLS_PER_BODY // 10


@pytest.mark.parametrize("path", READS)
def test_every_page_is_as_documented(schema: Any, path: str) -> None:
    statuses = set(call_many(schema[path]["GET"], GenerationMode.POSITIVE, 5))
    assert statuses <= ({200, 403} if path == "/v1/demand" else {200})


@pytest.mark.parametrize(("method", "path"), BY_ID)
def test_any_id_is_answered_as_documented(schema: Any, method: str, path: str) -> None:
    statuses = call_many(schema[path][method], GenerationMode.POSITIVE, 25)
    assert statuses[404] > 0


def test_every_operation_is_covered(schema: Any) -> None:
    documented = {operation.ok().label for operation in schema.get_all_operations()}
    covered = [*(("POST", path) for path in BODIES), *(("GET", path) for path in READS), *BY_ID]
    assert documented == {f"{method} {path}" for method, path in covered}
    assert len(BODIES) * len(GenerationMode) * CALLS_PER_BODY >= 1000
