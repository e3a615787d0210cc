"""The fields that say what an answer must look like, and what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_fixtures import USER, Api

from loraplex.core.structured_output import OutputKind
from loraplex.server.output_format import as_structured_outputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT: dict[str, Any] = {"model": "pirate", "messages": USER}
COMPLETION: dict[str, Any] = {"model": "base", "prompt": "Hello"}


@pytest.mark.parametrize(
    ("field", "value", "kind", "text"),
    [
        ("response_format", {"type": "json_object"}, OutputKind.JSON_OBJECT, ""),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
            OutputKind.JSON,
            SCHEMA,
        ),
        ("guided_json", SCHEMA, OutputKind.JSON, SCHEMA),
        ("guided_json", json.dumps(SCHEMA), OutputKind.JSON, SCHEMA),
        ("guided_regex", "a+", OutputKind.REGEX, "a+"),
        ("guided_choice", ["x", "y"], OutputKind.CHOICE, ["x", "y"]),
        ("guided_grammar", 'root ::= "a"', OutputKind.GRAMMAR, 'root ::= "a"'),
        ("structured_outputs", {"json": SCHEMA}, OutputKind.JSON, SCHEMA),
        ("structured_outputs", {"json_object": True}, OutputKind.JSON_OBJECT, ""),
        ("structured_outputs", {"regex": "a+"}, OutputKind.REGEX, "a+"),
        ("structured_outputs", {"choice": ["x"]}, OutputKind.CHOICE, ["x"]),
        ("structured_outputs", {"grammar": 'start: "a"'}, OutputKind.GRAMMAR, 'start: "a"'),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "text"]
)
def test_each_form_is_understood(
    api: Api, path: str, body: dict[str, Any], field: str, value: Any, kind: OutputKind, text: Any
) -> None:
    assert api.post(path, {**body, field: value}).status_code == 200
    [request] = api.served.engine.requests
    wanted = request.params.structured_output
    assert wanted is not None
    assert (wanted.kind, wanted.param) == (kind, field)
    assert (wanted.text if isinstance(text, str) else json.loads(wanted.text)) == text
    # A fleet passes it on to its backends in vLLM's form.
    again = api.post(path, {**body, "structured_outputs": as_structured_outputs(wanted)})
    assert again.status_code == 200
    passed_on = api.served.engine.requests[-1].params.structured_output
    assert passed_on is not None
    assert (passed_on.kind, passed_on.text) == (wanted.kind, wanted.text)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}],
    ids=str,
)
def test_any_text_is_the_default(api: Api, fields: dict[str, Any]) -> None:
    assert api.post("/v1/chat/completions", {**CHAT, **fields}).status_code == 200
    [request] = api.served.engine.requests
    assert request.params.structured_output is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "json_schema, which has the schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "response_format",
            "no other type does",
        ),
        (
            {"response_format": {"type": "yaml"}},
            "response_format.type",
            "send text, json_object or json_schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "says nothing"),
        ({"guided_json": ""}, "guided_json", "correct the JSON schema"),
        ({"guided_choice": []}, "guided_choice", ""),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", ""),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex", "give one"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "give one"),
        ({"guided_regex": "a("}, "guided_regex", "correct the regular expression"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "70,000 characters"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type: strin"),
        ({"guided_json": "nope"}, "guided_json", "correct the JSON schema"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "correct the grammar"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "leave one of them out"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "leave one of them out"),
    ],
)
def test_what_is_wrong_is_said(api: Api, fields: dict[str, Any], param: str, words: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        response = api.post(path, {**body, **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
    assert api.served.engine.requests == []
