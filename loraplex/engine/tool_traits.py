"""How a chat template renders tools and calls, found out by rendering short conversations.

Templates are programs: only their output shows whether they keep all calls of a message, or need a field that
OpenAI's API leaves to the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class ToolTraits:
    """`shows_many_calls`: an answer with several calls can be part of a history. `needs_descriptions`: tools
    without a description are an error."""

    shows_many_calls: bool = True
    needs_descriptions: bool = False


_MARKS: Final = ("probe-one", "probe-two")
"""Arguments of the calls, which are rendered if the calls are."""
_IDS: Final = ("probe0001", "probe0002")  # Mistral's templates accept nine letters and digits
_PARAMETERS: Final = {"type": "object", "properties": {"text": {"type": "string", "description": "A text"}}}
_QUESTION: Final = {"role": "user", "content": "Hello"}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A conversation that is rendered to see what comes out."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]


def _tool(**described: str) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": "probe", **described, "parameters": _PARAMETERS}}


def _after_calls(num_calls: int) -> Probe:
    """Return a history with a message of this many calls, and their results."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": {"text": mark}}}
        for call_id, mark in zip(_IDS[:num_calls], _MARKS, strict=False)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": "probe", "content": "Done"} for call in calls
    ]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    return Probe(messages=[_QUESTION, asked, *results], tools=[_tool(description="A tool")])


PROBES: Final = (
    Probe(messages=[_QUESTION], tools=[_tool(description="A tool")]),
    Probe(messages=[_QUESTION], tools=[_tool()]),
    _after_calls(1),
    _after_calls(2),
)


def traits_of(rendered: Sequence[str | None]) -> ToolTraits:
    """Return the traits of a template by what it makes of each of `PROBES`; None for one that it refused.

    A template that refuses the simpler conversation of a pair, too, shows nothing: it is taken for one that
    knows no such limit, and refuses requests itself."""
    described, undescribed, one_call, two_calls = rendered
    shows_one = one_call is not None and _MARKS[0] in one_call
    shows_two = two_calls is not None and all(mark in two_calls for mark in _MARKS)
    return ToolTraits(
        shows_many_calls=shows_two or not shows_one,
        needs_descriptions=described is not None and undescribed is None,
    )
