"""Values and objects of a JSON text, counted without decoding it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.json_size import JsonSize, json_size

TEXTS = st.text(alphabet=st.sampled_from('ab,{}[]"\\ é\n'), max_size=8)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> JsonSize:
    if not isinstance(value, list | dict):
        return JsonSize(0, 0, 0)
    inner = [counted(item) for item in (value if isinstance(value, list) else value.values())]
    return JsonSize(
        num_commas=max(len(inner) - 1, 0) + sum(size.num_commas for size in inner),
        num_objects=isinstance(value, dict) + sum(size.num_objects for size in inner),
        num_lists=isinstance(value, list) + sum(size.num_lists for size in inner),
    )


@given(VALUES, st.booleans())
def test_counts_are_those_of_the_decoded_value(value: Any, ascii_only: bool) -> None:
    assert json_size(json.dumps(value, ensure_ascii=ascii_only).encode()) == counted(value)


@pytest.mark.parametrize("body", [b"", b'"', b"\\", b'{"a\\', b"\xff\xfe{", b'"\\\\\\"'])
def test_what_is_no_json_does_no_harm(body: bytes) -> None:
    assert json_size(body).num_objects <= len(body)
