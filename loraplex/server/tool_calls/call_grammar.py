"""Grammars of answers that call tools, in the notation of llguidance, which is Lark's.

A mark that is one token of the vocabulary is written by its id: text never matches such a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from loraplex.engine.schema_rules import JSON_WHITESPACE, closed_schema
from loraplex.server.reasoning import END_THINK, THINK
from loraplex.server.tool_calls.formats import MARKS, NAME_MARK, ToolFormat

_MAX_CALLS: Final = 32
"""Most calls in one answer: a model without an idea of how to go on would write them without end."""
_TERMINALS: Final = r"""TEXT: /(.|\n)*/
SPACES: /[ \t\r\n]{0,8}/
PROSE: /[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/"""


class Thinking(Enum):
    """Reasoning before the answer."""

    NONE = auto()
    POSSIBLE = auto()
    BEGUN = auto()
    """The prompt ends with its beginning."""


@dataclass(frozen=True, kw_only=True)
class CallGrammar:
    """`functions`: schemas of arguments by name. `is_forced`: the answer is calls and nothing else.
    `answer_schema`: what an answer must look like that calls nothing; None for any text. `uses_name_marks`:
    see `formats`. `token_id`: the id of a text that is one token, if it is."""

    tool_format: ToolFormat
    functions: Mapping[str, str]
    is_forced: bool
    is_single: bool
    token_id: Callable[[str], int | None]
    thinking: Thinking = Thinking.NONE
    answer_schema: str | None = None
    uses_name_marks: bool = False

    def lark(self) -> str:
        """Return the grammar."""
        think = {Thinking.NONE: "", Thinking.POSSIBLE: "think? ", Thinking.BEGUN: "think "}[self.thinking]
        rules = [f"start: {think}answer"]
        if self.thinking is not Thinking.NONE:
            begin = "" if self.thinking is Thinking.BEGUN else self._mark(THINK) + " "
            rules += [f"think: {begin}thought SPACES", *self._text_up_to("thought", END_THINK)]
        rules += self._answer_rules()
        for place, (name, schema) in enumerate(self.functions.items()):
            rules.append(f"call_{place}: {self._call(name, schema)}")
        return "\n".join([*rules, _TERMINALS]) + "\n"

    def _answer_rules(self) -> list[str]:
        most = 1 if self.is_single else _MAX_CALLS
        one = f"one: {' | '.join(f'call_{place}' for place in range(len(self.functions)))}"
        free = None if self.is_forced else "TEXT" if self.answer_schema is None else "schema_answer"
        rules = [one]
        if self.answer_schema is not None and not self.is_forced:
            rules.append(f"schema_answer: %json {self.answer_schema}")
        begin = MARKS[self.tool_format].begin
        match self.tool_format:
            case ToolFormat.HERMES:
                end = self._mark(MARKS[self.tool_format].end or "")
                rules.append(f'body: "\\n" one "\\n" {end}')
                rules.append(
                    f"calls: {self._mark(begin)} body {_more(f'SPACES {self._mark(begin)} body', most)}"
                )
                if free == "TEXT":
                    rules += [f"answer: (head body){{0,{most}}} TEXT", *self._text_up_to("head", begin)]
                    return rules
            case ToolFormat.LLAMA3_JSON:
                # Models without the mark in their vocabulary do without it, also in other text: what comes
                # after it would be read as a call.
                mark, prose = f"{self._mark(begin)}? ", "PROSE"
                if self.token_id(begin) is None:
                    mark, prose = "", "UNMARKED"
                    rules.append(f"UNMARKED: PROSE & ~/(.|\\n)*{re.escape(begin)}(.|\\n)*/")
                separated = '"; " one'
                rules.append(f"calls: {mark}one {_more(separated, most)}")
                free = prose if free == "TEXT" else free
            case ToolFormat.MISTRAL:
                body = f'SPACES "[" one {_more(_LISTED, most)} "]"'
                if self.uses_name_marks:
                    body = f"one {_more(f'{self._mark(begin)} one', most)}"
                rules += [f"body: {body}", f"calls: {self._mark(begin)} body"]
                if free == "TEXT":
                    rules += ["answer: TEXT | head body", *self._text_up_to("head", begin)]
                    return rules
        rules.append("answer: calls" if free is None else f"answer: calls | {free}")
        return rules

    def _call(self, name: str, schema: str) -> str:
        if self.uses_name_marks:
            return f"{json.dumps(name)} {self._mark(NAME_MARK)} %json {schema}"
        key = MARKS[self.tool_format].arguments_key
        if self.answer_schema is not None and not self.is_forced and MARKS[self.tool_format].is_optional:
            return f"%json {_call_schema(name, key, schema)}"
        begin = f"{{{json.dumps('name')}: {json.dumps(name)}, {json.dumps(key)}: "
        return f'{json.dumps(begin)} %json {schema} "}}"'

    def _text_up_to(self, rule: str, mark: str) -> Sequence[str]:
        """Return the rule of a text and the first mark after it."""
        if self.token_id(mark) is None:
            return [f"{rule}[lazy]: TEXT {self._mark(mark)}"]
        return [f"{rule}: TEXT {self._mark(mark)}"]

    def _mark(self, mark: str) -> str:
        token_id = self.token_id(mark)
        return json.dumps(mark) if token_id is None else f"<[{token_id}]>"


def _call_schema(name: str, key: str, schema: str) -> str:
    """Return the schema of a call, for answers that are a call or another object: the parser must not have to
    decide between the two by their first characters."""
    parameters = json.loads(schema)
    shared = {part: parameters[part] for part in ("$defs", "definitions") if part in parameters}
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return json.dumps({**shared, **call, "x-guidance": parameters["x-guidance"]}, ensure_ascii=False)


_LISTED: Final = '", " one'


def _more(rule: str, most: int) -> str:
    """Return what comes after the first one."""
    return f"({rule}){{0,{most - 1}}}" if most > 1 else ""


def argument_schema(parameters: Mapping[str, Any] | None) -> str:
    """Return the schema of a function's arguments, which are an object."""
    if parameters is None:
        return json_schema('{"type": "object", "properties": {}, "additionalProperties": false}')
    return json_schema(json.dumps({**parameters, "type": "object"}, ensure_ascii=False))


def json_schema(text: str) -> str:
    """Return a schema as it is followed (`closed_schema`), to be put into a grammar."""
    schema = json.loads(closed_schema(text))
    rules = {"whitespace_pattern": JSON_WHITESPACE}
    return json.dumps({**schema, "x-guidance": rules}, ensure_ascii=False)
