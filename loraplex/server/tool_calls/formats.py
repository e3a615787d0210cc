"""The formats in which models write calls, and which of them a chat template has.

    hermes         <tool_call>{"name": "weather", "arguments": {...}}</tool_call>     Hermes, Qwen 2.5 and 3
    llama3_json    {"name": "weather", "parameters": {...}}                           Llama 3.1 to 3.3
    mistral        [TOOL_CALLS] [{"name": "weather", "arguments": {...}}]             Mistral
                   [TOOL_CALLS]weather[ARGS]{...}                                     newer ones

Formats have vLLM's names. Tokens such as <|python_tag|> and [TOOL_CALLS] are special in their vocabularies:
they are shown where calls are read, unlike others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

NAME_MARK: Final = "[ARGS]"


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"


@dataclass(frozen=True, kw_only=True)
class CallMarks:
    """`begin` comes before calls, `end` after each, if there is one. `arguments_key`: the key of a call's
    arguments. `is_optional`: calls may also begin an answer without `begin`."""

    begin: str
    end: str | None = None
    arguments_key: str = "arguments"
    is_optional: bool = False


MARKS: Final = {
    ToolFormat.HERMES: CallMarks(begin="<tool_call>", end="</tool_call>"),
    ToolFormat.LLAMA3_JSON: CallMarks(begin="<|python_tag|>", arguments_key="parameters", is_optional=True),
    ToolFormat.MISTRAL: CallMarks(begin="[TOOL_CALLS]"),
}


def knows_tools(template: str) -> bool:
    """Return whether a template renders tools at all."""
    return "tools" in template


def format_of_template(template: str) -> ToolFormat | None:
    """Return the format that a template writes the calls of its history in; None if it is none of these."""
    if MARKS[ToolFormat.HERMES].begin in template and "<function=" not in template:
        return ToolFormat.HERMES
    if MARKS[ToolFormat.MISTRAL].begin in template:
        return ToolFormat.MISTRAL
    if '"parameters": ' in template and ("<|start_header_id|>" in template or "<|python_tag|>" in template):
        return ToolFormat.LLAMA3_JSON
    return None
