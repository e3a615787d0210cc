"""Reads how an answer must look from the fields of OpenAI's and vLLM's clients."""

from __future__ import annotations

from typing import Any

import msgspec

from loraplex.core.errors import InvalidRequestError
from loraplex.core.structured_output import OutputKind, StructuredOutput
from loraplex.server.requests import ResponseFormat, SamplingFields, StructuredOutputs


def structured_output(request: SamplingFields) -> StructuredOutput | None:
    """Return what the answer must look like; None for any text. Raises InvalidRequestError if several fields
    say so, or one says several things."""
    found = [
        *_of_response_format(request.response_format),
        *_of_structured_outputs(request.structured_outputs),
        *_given("guided_json", OutputKind.JSON, request.guided_json),
        *_given("guided_regex", OutputKind.REGEX, request.guided_regex),
        *_given("guided_choice", OutputKind.CHOICE, request.guided_choice),
        *_given("guided_grammar", OutputKind.GRAMMAR, request.guided_grammar),
    ]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        both = first if first == second else f"{first} and {second}"
        raise InvalidRequestError(
            f"{both}: an answer can follow one schema, expression or grammar; give one", param=second
        )
    return found[0] if found else None


def as_structured_outputs(wanted: StructuredOutput) -> dict[str, Any]:
    """Return the value of `structured_outputs` that asks for this."""
    match wanted.kind:
        case OutputKind.JSON_OBJECT:
            return {"json_object": True}
        case OutputKind.CHOICE:
            return {"choice": msgspec.json.decode(wanted.text)}
        case _:
            return {wanted.kind.value: wanted.text}


def _of_response_format(given: ResponseFormat | None) -> list[StructuredOutput]:
    param = "response_format"
    if given is None or (given.type != "json_schema" and given.json_schema is None and given.type == "text"):
        return []
    if (given.type == "json_schema") != (given.json_schema is not None):
        raise InvalidRequestError(
            'response_format: {"type": "json_schema"} goes with a field json_schema, which has the schema, '
            "and no other type does",
            param=param,
        )
    if given.json_schema is None:
        return [StructuredOutput(OutputKind.JSON_OBJECT, param=param)]
    return _given(param, OutputKind.JSON, given.json_schema.schema)


def _of_structured_outputs(given: StructuredOutputs | None) -> list[StructuredOutput]:
    if given is None:
        return []
    param = "structured_outputs"
    any_object = [StructuredOutput(OutputKind.JSON_OBJECT, param=param)] if given.json_object else []
    if given == StructuredOutputs():
        raise InvalidRequestError(
            "structured_outputs says nothing; give json, json_object, regex, choice or grammar in it, or "
            "leave it out",
            param=param,
        )
    return [
        *_given(param, OutputKind.JSON, given.json),
        *_given(param, OutputKind.REGEX, given.regex),
        *_given(param, OutputKind.CHOICE, given.choice),
        *_given(param, OutputKind.GRAMMAR, given.grammar),
        *any_object,
    ]


def _given(
    param: str, kind: OutputKind, value: dict[str, Any] | list[str] | str | None
) -> list[StructuredOutput]:
    if value is None:
        return []
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return [StructuredOutput(kind, text, param)]
