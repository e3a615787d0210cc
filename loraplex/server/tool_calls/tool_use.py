"""Reads from a chat request which tools its answer may call, and must."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from loraplex.core.errors import InvalidRequestError
from loraplex.core.sampling import SamplingParams
from loraplex.core.structured_output import OutputKind, StructuredOutput
from loraplex.engine.tool_traits import ToolTraits
from loraplex.server.answer_reader import CallReading
from loraplex.server.chat_options import ChatOptions, ToolCallParser
from loraplex.server.tool_calls.call_grammar import CallGrammar, Thinking, argument_schema, json_schema
from loraplex.server.tool_calls.definitions import NamedChoice, Tool, ToolChoice
from loraplex.server.tool_calls.formats import MARKS, NAME_MARK, ToolFormat, knows_tools

_MAX_BYTES: Final = 2**18
"""Most bytes of all tools as JSON."""
_ANY_OBJECT: Final = '{"type": "object"}'


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tools of one request. `forced`: those of which one must be called; None if the model chooses.
    `is_strict`: calls follow their schemas even then. `is_single`: at most one call is reported.
    `needs_descriptions`: the chat template renders no tool without a description."""

    tools: Sequence[Tool]
    tool_format: ToolFormat
    forced: Sequence[Tool] | None
    is_strict: bool
    is_single: bool
    uses_name_marks: bool
    needs_descriptions: bool

    @property
    def num_bytes(self) -> int:
        """Return the length of all tools as JSON."""
        return len(msgspec.json.encode(self.tools))

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [self._for_template(tool) for tool in self.tools]

    @property
    def reading(self) -> CallReading:
        return CallReading(
            tool_format=self.tool_format,
            names={tool.function.name for tool in self.tools},
            max_calls=1 if self.is_single else None,
        )

    @property
    def schemas(self) -> Sequence[StructuredOutput]:
        """The schemas that calls must follow, each for itself: whichever is wrong can be named."""
        wanted = {tool.function.name for tool in self._with_grammar}
        return [
            StructuredOutput(
                OutputKind.JSON,
                msgspec.json.encode(tool.function.parameters).decode(),
                param=f"tools[{place}].function.parameters",
            )
            for place, tool in enumerate(self.tools)
            if tool.function.name in wanted and tool.function.parameters is not None
        ]

    def applied_to(
        self, params: SamplingParams, *, thinking: Thinking, token_id: Callable[[str], int | None]
    ) -> SamplingParams:
        """Return sampling options by which calls are as they must be."""
        tools, answer = self._with_grammar, params.structured_output
        if not tools and answer is None:
            return params
        for place, tool in enumerate(self.tools):
            kind = (tool.function.parameters or {}).get("type", "object")
            if kind != "object":
                raise InvalidRequestError(
                    "the parameters of a tool are an object; correct the JSON schema of "
                    f"{tool.function.name!r}: its type is to be 'object'",
                    param=f"tools[{place}].function.parameters",
                )
        answer_schema = None if answer is None else _schema_of_answer(answer)
        try:
            grammar = CallGrammar(
                tool_format=self.tool_format,
                functions={
                    tool.function.name: argument_schema(tool.function.parameters)
                    for tool in tools or self.tools
                },
                is_forced=self.forced is not None,
                is_single=self.is_single,
                token_id=token_id,
                thinking=thinking,
                answer_schema=answer_schema,
                uses_name_marks=self.uses_name_marks,
            ).lark()
        except RecursionError:
            raise InvalidRequestError(
                "the parameters of a tool are nested too deeply", param="tools"
            ) from None
        return replace(params, structured_output=StructuredOutput(OutputKind.GRAMMAR, grammar, param="tools"))

    def _for_template(self, tool: Tool) -> dict[str, Any]:
        function = tool.function
        description = function.description
        if description is None and self.needs_descriptions:
            description = ""
        described = {} if description is None else {"description": description}
        parameters = function.parameters
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        return {
            "type": "function",
            "function": {"name": function.name, **described, "parameters": parameters},
        }

    @property
    def _with_grammar(self) -> Sequence[Tool]:
        """The tools that a grammar is needed for."""
        if self.forced is not None:
            return self.forced
        return self.tools if self.is_strict else ()


def tool_use(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    *,
    is_parallel: bool,
    template: str,
    traits: ToolTraits,
    options: ChatOptions,
    is_own_template: bool = False,
) -> ToolUse | None:
    """Return how the tools are used; None if none may be called. Raises InvalidRequestError for what cannot
    be done. `template`: the source of the chat template, which the request brings if `is_own_template`;
    `traits`: what it does with tools."""
    if not tools:
        if choice in (None, "none", "auto"):
            return None
        raise InvalidRequestError("tool_choice needs tools; send them, or leave it out", param="tool_choice")
    _check_size(tools)
    _check_names(tools)
    if choice == "none":
        return None
    forced: Sequence[Tool] | None = None
    if isinstance(choice, NamedChoice):
        forced = [tool for tool in tools if tool.function.name == choice.function.name]
        if not forced:
            raise InvalidRequestError(
                f"tool_choice names {choice.function.name!r}, which is not among the tools",
                param="tool_choice",
            )
    elif choice == "required":
        forced = tools
    return ToolUse(
        tools=tools,
        tool_format=_format(template, options, is_own=is_own_template),
        forced=forced,
        is_strict=any(tool.function.strict for tool in tools),
        is_single=isinstance(choice, NamedChoice) or not is_parallel or not traits.shows_many_calls,
        uses_name_marks=NAME_MARK in template,
        needs_descriptions=traits.needs_descriptions,
    )


def _check_size(tools: Sequence[Tool]) -> None:
    num_bytes = len(msgspec.json.encode(tools))
    if num_bytes > _MAX_BYTES:
        raise InvalidRequestError(
            f"the tools have {num_bytes:,} bytes, more than the {_MAX_BYTES:,} that a request may have; send "
            "fewer",
            param="tools",
        )


def _check_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        if tool.function.name in seen:
            raise InvalidRequestError(
                f"two tools are called {tool.function.name!r}; rename one",
                param=f"tools[{place}].function.name",
            )
        seen.add(tool.function.name)


def _format(template: str, options: ChatOptions, *, is_own: bool) -> ToolFormat:
    """Return the format in which a template has calls. `is_own`: the request brings it."""
    if is_own and not knows_tools(template):
        raise InvalidRequestError(
            "the request's chat_template does not render `tools`: leave tools out, or send a template that "
            "does",
            param="chat_template",
        )
    if not knows_tools(template):
        raise InvalidRequestError(
            "this model's chat template does not know tools: leave them out, or put a template that knows "
            "them into the model's folder as chat_template.jinja",
            param="tools",
        )
    found = options.tool_format(template)
    if found is None and is_own and options.tool_call_parser is ToolCallParser.AUTO:
        raise InvalidRequestError(
            "the server does not know how the request's chat_template writes calls of tools: leave tools "
            "out, or write them as " + " or ".join(MARKS[each].begin for each in ToolFormat),
            param="chat_template",
        )
    if found is None:
        known = ", ".join(f"{each} ({MARKS[each].begin})" for each in ToolFormat)
        raise InvalidRequestError(
            "the server does not know how this model writes calls of tools: leave them out, or start it with "
            f"--tool-call-parser and one of {known}",
            param="tools",
        )
    return found


def _schema_of_answer(wanted: StructuredOutput) -> str:
    match wanted.kind:
        case OutputKind.JSON_OBJECT:
            return json_schema(_ANY_OBJECT)
        case OutputKind.JSON if _is_object(wanted.text):
            return json_schema(wanted.text)
        case _:
            raise InvalidRequestError(
                f"{wanted.param} does not go with tools, unless it is a JSON schema; leave one of them out, "
                'or send tool_choice "none"',
                param=wanted.param,
            )


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), Mapping)
    except msgspec.DecodeError:
        return False
