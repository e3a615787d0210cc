"""Calls and reasoning in the text of answers, cut at every position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from loraplex.server.answer_reader import AnswerReader, AnswerReading, CallReading, ReasoningReading
from loraplex.server.tool_calls.formats import ToolFormat, format_of_template

HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL
OSLO = '{"city": "Oslo", "deep": [{"a": "}]\\"{"}, 1.5, null]}'
TAG = "<|python_tag|>"
Call = tuple[str, str]

# The answer, its content, its calls, and whether all calls are complete.
CASES: list[tuple[ToolFormat, str, str, list[Call], bool]] = [
    (HERMES, "Hello <b>world</b> {}", "Hello <b>world</b> {}", [], False),
    (HERMES, " \n spaces \n", " \n spaces \n", [], False),
    (HERMES, "", "", [], False),
    (
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
        "Let me see.",
        [("weather", OSLO)],
        True,
    ),
    (
        HERMES,
        (
            f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>\n'
            '<tool_call>{"arguments" : {"b":2} ,"name":"ti\\u006de"}</tool_call>\nDone.'
        ),
        "\nDone.",
        [("weather", OSLO), ("time", '{"b":2}')],
        True,
    ),
    (HERMES, '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")], True),
    (HERMES, '<tool_call>{"name": "time", "arguments": null}', "", [("time", "{}")], True),
    (HERMES, '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}', "", [("time", '{"a": 1}')], True),
    (HERMES, '<tool_call>{"name": "time", "arguments": {"a', "", [("time", '{"a')], False),
    (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}', "", [("unknown", "{}")], True),
    # None of these is a call: nothing of them is lost.
    (HERMES, "a <tool_call>\nno object</tool_call> b", "a <tool_call>\nno object</tool_call> b", [], False),
    (HERMES, '<tool_call>{"nam', '<tool_call>{"nam', [], False),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', [], False),
    (HERMES, '<tool_call>{"arguments": {}}x', '<tool_call>{"arguments": {}}x', [], False),
    (HERMES, "x <tool_ca", "x <tool_ca", [], False),
    (HERMES, "</tool_call>", "</tool_call>", [], False),
    (HERMES, '<tool_call><tool_call>{"name": "time"}', "<tool_call>", [("time", "{}")], True),
    (LLAMA, f'{{"name": "weather", "parameters": {OSLO}}}', "", [("weather", OSLO)], True),
    (LLAMA, f'\n{TAG}{{"name": "weather", "parameters": {OSLO}}}', "", [("weather", OSLO)], True),
    (
        LLAMA,
        (
            f'{{"type": "function", "name": "weather", "parameters": {OSLO}}}; '
            '{"name": "time", "parameters": {}};\n'
        ),
        "",
        [("weather", OSLO), ("time", "{}")],
        True,
    ),
    (LLAMA, '{"name": "time", "parameters": {}} and so on', " and so on", [("time", "{}")], True),
    (LLAMA, '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', [], False),
    (LLAMA, '{"name": "time", "age": 3}', '{"name": "time", "age": 3}', [], False),
    (LLAMA, '{"name": "time"}', '{"name": "time"}', [], False),
    (LLAMA, '{"answer": [1, 2]} ', '{"answer": [1, 2]} ', [], False),
    (LLAMA, 'See: {"name": "time", "parameters": {}}', 'See: {"name": "time", "parameters": {}}', [], False),
    (LLAMA, f"{TAG}print(1)", f"{TAG}print(1)", [], False),
    (
        MISTRAL,
        f'I look.[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}, {{"name": "time", "id": "a"}}]',
        "I look.",
        [("weather", OSLO), ("time", "{}")],
        True,
    ),
    (MISTRAL, '[TOOL_CALLS]{"name": "time", "arguments": {}}', "", [("time", "{}")], True),
    (
        MISTRAL,
        f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]time[CALL_ID]abc[ARGS]{{}}",
        "",
        [("weather", OSLO), ("time", "{}")],
        True,
    ),
    (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"c', "", [("weather", '{"c')], False),
    (MISTRAL, "[TOOL_CALLS] I cannot", "[TOOL_CALLS] I cannot", [], False),
    (MISTRAL, '[TOOL_CALLS] [{"x": 1}, 2]', '[TOOL_CALLS] [{"x": 1}, 2]', [], False),
    (MISTRAL, "[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]", [], False),
]


def read(pieces: Sequence[str], reading: AnswerReading) -> dict[str, Any]:
    """Return the parts of an answer, each joined."""
    reader = AnswerReader(reading)
    reasoning, content, calls = "", "", {}
    for index, piece in enumerate(pieces):
        delta = reader.read(piece, is_last=index == len(pieces) - 1)
        reasoning += delta.reasoning
        content += delta.content
        for call in delta.calls:
            if call.index not in calls:
                assert call.call_id
                assert call.index == len(calls)
                calls[call.index] = [call.name, ""]
            else:
                assert call.call_id is call.name is None
            calls[call.index][1] += call.arguments
    return {
        "reasoning": reasoning,
        "content": content,
        "calls": [tuple(call) for call in calls.values()],
        "complete": reader.ends_in_call,
    }


def pieces_of(text: str) -> list[list[str]]:
    """Return the text whole, in single characters, and cut in two at each position."""
    return [[text], list(text) or [""], *([text[:place], text[place:]] for place in range(len(text) + 1))]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls", "complete"), CASES)
def test_calls_are_found_however_the_answer_is_cut(
    tool_format: ToolFormat, text: str, content: str, calls: list[Call], complete: bool
) -> None:
    reading = AnswerReading(calls=CallReading(tool_format=tool_format, names={"weather", "time"}))
    wanted = {"reasoning": "", "content": content, "calls": calls, "complete": complete}
    for pieces in pieces_of(text):
        assert read(pieces, reading) == wanted, pieces


@pytest.mark.parametrize(
    ("text", "has_begun", "reasoning", "answer"),
    [
        ("<think>\nI add: 1 < 2\n</think>\n\nThree.\n", False, "I add: 1 < 2", "Three.\n"),
        ("\n<think></think>Three.", False, "", "Three."),
        ("I add.</think>\n Three.", True, "I add.", "Three."),
        ("<think>I am cut </thi", False, "I am cut </thi", ""),
        (" \n ", True, "", ""),
        (" Three. <think>no</think>", False, "", " Three. <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("<think>a</think>b</think><think>c", False, "a", "b</think><think>c"),
    ],
)
def test_reasoning_is_told_from_the_answer_however_it_is_cut(
    text: str, has_begun: bool, reasoning: str, answer: str
) -> None:
    for is_shown in (True, False):
        reading = AnswerReading(reasoning=ReasoningReading(has_begun=has_begun, is_shown=is_shown))
        for pieces in pieces_of(text):
            found = read(pieces, reading)
            assert (found["reasoning"], found["content"]) == (reasoning if is_shown else "", answer), pieces


def test_calls_come_after_reasoning_and_not_in_it() -> None:
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    reading = AnswerReading(
        calls=CallReading(tool_format=HERMES, names={"time"}), reasoning=ReasoningReading()
    )
    for pieces in pieces_of(f"<think>I could {call}</think>\n{call}"):
        found = read(pieces, reading)
        assert found["reasoning"] == f"I could {call}"
        assert (found["content"], found["calls"]) == ("", [("time", "{}")])


def test_no_more_calls_are_reported_than_are_wanted() -> None:
    text = '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    reading = AnswerReading(calls=CallReading(tool_format=HERMES, names={"a", "b"}, max_calls=1))
    for pieces in pieces_of(text):
        found = read(pieces, reading)
        assert (found["calls"], found["complete"], found["content"]) == ([("a", '{"x": 1}')], True, "")


def test_arguments_come_as_they_are_written() -> None:
    reader = AnswerReader(AnswerReading(calls=CallReading(tool_format=HERMES, names={"time"})))
    assert reader.read('<tool_call>{"name": "time", "arguments": ', is_last=False).calls == []
    (begun,) = reader.read('{"a": ', is_last=False).calls
    assert (begun.name, begun.arguments) == ("time", '{"a": ')
    (more,) = reader.read("12", is_last=False).calls
    assert (more.name, more.arguments) == (None, "12")


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ("{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}", HERMES),
        ("{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", MISTRAL),
        ('<|start_header_id|>{{ tools }}\'{"name": name, "parameters": ', LLAMA),
        ("<tool_call><function=a><parameter=b>{{ tools }}", None),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_known_by_the_template(template: str, tool_format: ToolFormat | None) -> None:
    assert format_of_template(template) is tool_format
