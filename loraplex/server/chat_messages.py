"""The messages of a conversation, as clients send them and as chat templates read them.

A conversation may contain tool calls and their results as history. Templates of the Hugging Face hub expect
the arguments of a call as an object, not as the JSON text that OpenAI's API has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from loraplex.core.errors import InvalidRequestError
from loraplex.engine.prompt_encoder import refuse_many_messages

_MAX_ARGUMENT_VALUES: Final = 2**14


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


Content = str | list[ContentPart]
Nothing = Annotated[list[Any], Meta(max_length=0)] | None


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of a function. `arguments` is a JSON object, or the text of one, as in OpenAI's answers."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # kept by clients that assemble calls from a stream


class _Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role"):
    """A message; its role is the tag. Clients that send answers back as history also send the empty
    fields."""

    name: str | None = None
    refusal: None = None
    annotations: Nothing = None
    audio: None = None
    function_call: None = None

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class _TextMessage(_Message, kw_only=True, forbid_unknown_fields=True):
    content: Content
    tool_calls: Nothing = None
    tool_call_id: None = None


class SystemMessage(_TextMessage, kw_only=True, tag="system"):
    pass


class DeveloperMessage(_TextMessage, kw_only=True, tag="developer"):
    pass


class UserMessage(_TextMessage, kw_only=True, tag="user"):
    pass


class AssistantMessage(_Message, kw_only=True, tag="assistant"):
    """A message with text, tool calls, or both. Its reasoning, by either name, is the template's to show."""

    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: None = None


class ToolMessage(_Message, kw_only=True, tag="tool"):
    """The result of the call with this id."""

    content: Content
    tool_call_id: str
    tool_calls: Nothing = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages in the form that chat templates expect.

    Content becomes plain text, the role developer becomes system, and a tool's result gets the name of the
    tool, which OpenAI's API has only in the call.
    """
    refuse_many_messages(len(messages), sum(map(_num_parts, messages)))
    _refuse_many_arguments(messages)
    tool_names: dict[str | None, str] = {}
    plain = []
    for index, message in enumerate(messages):
        fields: dict[str, Any] = {
            "role": "system" if isinstance(message, DeveloperMessage) else message.role,
            "content": _text(message.content),
        }
        name = message.name
        if isinstance(message, AssistantMessage):
            if message.content is None and not message.tool_calls:
                where = f"messages[{index}].content"
                raise InvalidRequestError(
                    f"{where} is missing; an assistant has content or tool_calls", param=where
                )
            if reasoning := message.reasoning_content or message.reasoning:
                fields["reasoning_content"] = reasoning
            if message.tool_calls:
                fields["tool_calls"] = _template_calls(message.tool_calls, index)
                tool_names |= {call.id: call.function.name for call in message.tool_calls}
        elif isinstance(message, ToolMessage):
            fields["tool_call_id"] = message.tool_call_id
            name = name or tool_names.get(message.tool_call_id)
        plain.append(fields if name is None else {**fields, "name": name})
    return plain


def _num_parts(message: ChatMessage) -> int:
    """Return the number of parts of a message's content and of its tool calls."""
    num_calls = len(message.tool_calls or ())
    return num_calls + (len(message.content) if isinstance(message.content, list) else 0)


def _refuse_many_arguments(messages: Sequence[ChatMessage]) -> None:
    """Refuse tool calls whose arguments hold too many values to decode at once. Commas and brackets inside
    strings count too."""
    num_values = 0
    for message in messages:
        for call in message.tool_calls or ():
            if isinstance(text := call.function.arguments, str):
                num_values += text.count("{") + text.count("[") + text.count(",")
    if num_values > _MAX_ARGUMENT_VALUES:
        raise InvalidRequestError(
            f"the arguments of all tool calls hold more than {_MAX_ARGUMENT_VALUES:,} values; "
            "shorten the history",
            param="messages",
        )


def _text(content: Content | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""


def _template_calls(calls: Sequence[ToolCall], message_index: int) -> list[dict[str, Any]]:
    made = []
    for index, call in enumerate(calls):
        arguments = call.function.arguments
        if isinstance(arguments, str):
            where = f"messages[{message_index}].tool_calls[{index}].function.arguments"
            arguments = _decode_arguments(arguments, where)
        identity = {} if call.id is None else {"id": call.id}
        function = {"name": call.function.name, "arguments": arguments}
        made.append({**identity, "type": "function", "function": function})
    return made


def _decode_arguments(text: str, where: str) -> dict[str, Any]:
    if not text.strip():
        return {}  # a call without arguments
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise InvalidRequestError(f"{where} must be a JSON object, or the text of one", param=where) from None
