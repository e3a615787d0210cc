"""Grammars of calls: what they let through is what is read as valid calls, for all formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tool_templates import VOCAB_SIZE, tool_tokenizer

from loraplex.core.errors import InvalidRequestError
from loraplex.core.structured_output import OutputKind, StructuredOutput
from loraplex.engine.grammars import AnswerGrammar, Grammars
from loraplex.engine.tokenizer import Tokenizer
from loraplex.server.tool_calls.call_grammar import CallGrammar, Thinking, argument_schema, json_schema
from loraplex.server.tool_calls.formats import ToolFormat

WEATHER: dict[str, Any] = {"properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
FUNCTIONS = {"weather": argument_schema(WEATHER), "now": argument_schema(None)}
OSLO, NOW, WRONG = ('weather {"city": "Oslo"}', "now {}", 'weather {"city": "Bonn"}')
STYLES = ["hermes", "llama3_json", "mistral", "mistral named"]


def written(style: str, *calls: str) -> str:
    """Return calls in the format of a family."""
    pairs = [call.split(" ", 1) for call in calls]
    key = "parameters" if style == "llama3_json" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in pairs]
    match style:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        case "llama3_json":
            return "; ".join(objects)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case _:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in pairs)


class Language:
    """The answers of one grammar, for a tokenizer whose marks are single tokens, or not."""

    def __init__(self, folder: Path, style: str, *, has_marks: bool, **options: Any) -> None:
        hf = tool_tokenizer("qwen3", has_marks=has_marks)
        hf.save_pretrained(folder)
        self.tokenizer = Tokenizer(hf)
        grammar = CallGrammar(
            tool_format=ToolFormat(style.split()[0]),
            token_id=self.tokenizer.token_id,
            uses_name_marks="named" in style,
            **{"functions": FUNCTIONS, "is_forced": True, "is_single": False, **options},
        )
        self.wanted = StructuredOutput(OutputKind.GRAMMAR, grammar.lark(), param="tools")
        self.grammars = Grammars(folder / "tokenizer.json", VOCAB_SIZE, (2,))

    def has(self, text: str) -> bool:
        """Return whether the text is a whole answer."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        try:
            state = AnswerGrammar(self.grammars, self.wanted, (2,), ids)
        except InvalidRequestError as error:
            if error.param != "output_token_ids":
                raise
            return False
        return bool(state.matcher.is_accepting())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("has_marks", [True, False])
def test_forced_answers_are_valid_calls(tmp_path: Path, style: str, has_marks: bool) -> None:
    language = Language(tmp_path, style, has_marks=has_marks)
    for calls in ((OSLO,), (NOW,), (OSLO, NOW, OSLO)):
        assert language.has(written(style, *calls)), calls
    for text in (
        "",
        "Hello",
        written(style, WRONG),
        written(style, OSLO) + " and",
        written(style, OSLO)[:-1],
    ):
        assert not language.has(text), text
    one = Language(tmp_path, style, has_marks=has_marks, is_single=True)
    assert (one.has(written(style, OSLO)), one.has(written(style, OSLO, OSLO))) == (True, False)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("has_marks", [True, False])
def test_strict_calls_may_follow_text(tmp_path: Path, style: str, has_marks: bool) -> None:
    language = Language(tmp_path, style, has_marks=has_marks, is_forced=False)
    assert all(language.has(text) for text in ("", "Hello {} [1]\n", written(style, OSLO, NOW)))
    assert not language.has(written(style, WRONG))
    if style != "llama3_json":  # whose calls are no calls behind text
        assert language.has("Look:\n" + written(style, OSLO))
        assert not language.has("Look:\n" + written(style, WRONG))
    else:
        for before in ("<|python_tag|>", "Look: <|python_tag|>"):  # after it, text is read as a call
            assert not language.has(before + written(style, WRONG))


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_without_calls_follows_the_clients_schema(tmp_path: Path, style: str) -> None:
    schema = json_schema('{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}')
    language = Language(tmp_path, style, has_marks=True, is_forced=False, answer_schema=schema)
    assert language.has('{"a": 1}')
    assert language.has(written(style, OSLO))
    assert not any(language.has(text) for text in ("Hello", '{"a": 2}', written(style, WRONG)))
    any_object = json_schema('{"type": "object"}')
    language = Language(tmp_path, style, has_marks=True, is_forced=False, answer_schema=any_object)
    assert all(language.has(text) for text in ('{"name": 1}', '{"n": 2}', "{}", written(style, OSLO, NOW)))


@pytest.mark.parametrize("style", ["hermes", "mistral"])
@pytest.mark.parametrize("has_marks", [True, False])
def test_reasoning_comes_before_calls(tmp_path: Path, style: str, has_marks: bool) -> None:
    call = written(style, OSLO)
    possible = Language(tmp_path, style, has_marks=has_marks, thinking=Thinking.POSSIBLE)
    assert all(possible.has(text) for text in (call, f"<think>\nI {'{'} look.\n</think>\n\n{call}"))
    assert not possible.has(f"<think>{call}")
    begun = Language(tmp_path, style, has_marks=has_marks, thinking=Thinking.BEGUN)
    assert begun.has(f"I look.</think>{call}")
    assert not begun.has(call)
