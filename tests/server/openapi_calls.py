"""Generated calls of the operations of an OpenAPI document, each answer checked against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.python import asgi

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


def call_many(
    operation: Any,
    mode: GenerationMode,
    num_calls: int,
    adapt: Callable[[dict[str, Any]], None] = lambda body: None,
) -> Counter[int]:
    """Call an operation with generated input and validate each answer; returns the statuses seen. `adapt`
    changes valid bodies, so that they get past what no schema expresses."""
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
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                adapt(case.body)
            response = case.call(session=client)
            case.validate_response(response, checks=CHECKS)
            statuses[response.status_code] += 1

        run()
    return statuses
