"""The options by which a server reads the answers of its model in chats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loraplex.server.reasoning import END_THINK
from loraplex.server.tool_calls.formats import ToolFormat, format_of_template


class ToolCallParser(StrEnum):
    """`auto`: the format that the model's chat template has; `none`: tools are refused. The others are
    formats, by vLLM's names."""

    AUTO = "auto"
    NONE = "none"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"


class ReasoningParser(StrEnum):
    """`auto`: reasoning is told from answers if the chat template knows it; `none`: never."""

    AUTO = "auto"
    NONE = "none"
    QWEN3 = "qwen3"
    DEEPSEEK_R1 = "deepseek_r1"


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """`trusts_templates`: requests may bring chat templates of their own."""

    tool_call_parser: ToolCallParser = ToolCallParser.AUTO
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    trusts_templates: bool = False

    def tool_format(self, template: str) -> ToolFormat | None:
        """Return the format of calls of a model with this chat template; None if it is unknown."""
        match self.tool_call_parser:
            case ToolCallParser.AUTO:
                return format_of_template(template)
            case ToolCallParser.NONE:
                return None
            case named:
                return ToolFormat(named.value)

    def reads_reasoning(self, template: str) -> bool:
        """Return whether a model with this chat template may write reasoning before its answers."""
        if self.reasoning_parser is ReasoningParser.AUTO:
            return END_THINK in template
        return self.reasoning_parser is not ReasoningParser.NONE
