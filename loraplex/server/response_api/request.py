"""The body of /v1/responses, and the chat that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from loraplex.core.errors import InvalidRequestError
from loraplex.core.sampling import MAX_SEED
from loraplex.server.body import convert_part
from loraplex.server.chat_messages import (
    AssistantMessage,
    ChatMessage,
    ContentPart,
    DeveloperMessage,
    FunctionCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from loraplex.server.requests import ChatRequest, Count, JsonSchemaFormat, ResponseFormat
from loraplex.server.tool_calls.definitions import (
    MAX_TOOLS,
    ChosenFunction,
    FunctionDefinition,
    FunctionName,
    NamedChoice,
    Tool,
)

_MESSAGES: Final = {
    "system": SystemMessage,
    "developer": DeveloperMessage,
    "user": UserMessage,
}


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`strict` has no effect: a schema is always followed."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: None = None


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`summary` has no effect: reasoning is shown as it is."""

    effort: None = None
    summary: str | None = None
    generate_summary: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`input`: a text, or items: messages, function_call, function_call_output and reasoning. `tools`:
    functions only. Nothing is stored, whatever `store` says."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    # As in chats.
    seed: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    adapter_id: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    # Without effect here.
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    # Not supported.
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    max_tool_calls: None = None
    top_logprobs: Literal[0] | None = None


class _TextPart(msgspec.Struct, kw_only=True):
    """Parts of answers also have annotations and logprobs, which are dropped."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""
    refusal: str = ""


class _MessageItem(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_TextPart]
    type: Literal["message"] = "message"


class _CallItem(msgspec.Struct, kw_only=True):
    call_id: str
    name: str
    arguments: str


class _OutputItem(msgspec.Struct, kw_only=True):
    call_id: str
    output: str | list[_TextPart]


class _ReasoningItem(msgspec.Struct, kw_only=True):
    content: list[dict[str, Any]] | None = None


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Return the chat that has the same answer. Raises InvalidRequestError."""
    messages = _messages(body.input)
    if body.instructions:
        messages.insert(0, SystemMessage(content=body.instructions))
    return ChatRequest(
        model=body.model,
        adapter_id=body.adapter_id,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        tools=None if body.tools is None else [_tool(tool, i) for i, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text),
        seed=body.seed,
        chat_template_kwargs=body.chat_template_kwargs,
        priority=body.priority,
        cache_salt=body.cache_salt,
        user=body.user,
        safety_identifier=body.safety_identifier,
    )


_PARAMS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "prompt": "input",
}


def renamed(error: InvalidRequestError) -> InvalidRequestError:
    """Return an error about a chat as one about the response that asked for it."""
    first = (error.param or "").partition(".")[0].partition("[")[0]
    if first not in _PARAMS:
        return error
    return type(error)(str(error).replace(first, _PARAMS[first]), param=_PARAMS[first])


def _messages(given: str | list[dict[str, Any]]) -> list[ChatMessage]:
    if isinstance(given, str):
        return [UserMessage(content=given)]
    messages: list[ChatMessage] = []
    reasoning: str | None = None
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            message = convert_part(item, _MessageItem, where)
            if message.role == "assistant":
                content = _text(message.content)
                messages.append(AssistantMessage(content=content, reasoning_content=reasoning))
                reasoning = None
            else:
                messages.append(_MESSAGES[message.role](content=_text(message.content)))
        elif kind == "function_call":
            call = convert_part(item, _CallItem, where)
            last = messages[-1] if messages else None
            if not isinstance(last, AssistantMessage):  # calls of one answer belong to one message
                last = AssistantMessage(reasoning_content=reasoning)
                messages.append(last)
                reasoning = None
            function = FunctionCall(name=call.name, arguments=call.arguments)
            last.tool_calls = [*(last.tool_calls or ()), ToolCall(id=call.call_id, function=function)]
        elif kind == "function_call_output":
            output = convert_part(item, _OutputItem, where)
            messages.append(ToolMessage(content=_text(output.output), tool_call_id=output.call_id))
        elif kind == "reasoning":
            parts = convert_part(item, _ReasoningItem, where).content or []
            reasoning = "".join(str(part.get("text", "")) for part in parts) or None
        else:
            raise InvalidRequestError(
                f"{where}.type {str(kind)[:64]!r} is not supported by this server; send message, "
                "function_call, function_call_output or reasoning",
                param=f"{where}.type",
            )
    return messages


def _text(content: str | list[_TextPart]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [ContentPart(type="text", text=part.text or part.refusal) for part in content]


def _tool(tool: dict[str, Any], index: int) -> Tool:
    where, kind = f"tools[{index}]", tool.get("type")
    if kind != "function":
        raise InvalidRequestError(
            f"{where}.type {str(kind)[:64]!r} is not supported by this server, which runs no tools itself; "
            "send functions, and answer their calls",
            param=f"{where}.type",
        )
    read = convert_part(tool, FunctionTool, where)
    return Tool(
        function=FunctionDefinition(
            name=read.name, description=read.description, parameters=read.parameters, strict=read.strict
        )
    )


def _tool_choice(
    choice: Literal["none", "auto", "required"] | dict[str, Any] | None,
) -> Literal["none", "auto", "required"] | NamedChoice | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise InvalidRequestError(
            'tool_choice must be none, auto, required or {"type": "function", "name": ...}',
            param="tool_choice",
        )
    return NamedChoice(function=ChosenFunction(name=choice["name"]))


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    given = text.format
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    if given.schema is None:
        raise InvalidRequestError("text.format.schema is missing", param="text.format.schema")
    return ResponseFormat(
        type="json_schema",
        json_schema=JsonSchemaFormat(name=given.name, schema=given.schema, description=given.description),
    )
