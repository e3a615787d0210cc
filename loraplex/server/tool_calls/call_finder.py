"""Finds calls in the text of an answer, which may arrive in any pieces: what is found depends on the text
alone.

Spaces before a call are no content. What looks like a call and is none is content, as it was written.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from loraplex.server.tool_calls.answer_delta import AnswerBuilder
from loraplex.server.tool_calls.call_readers import CallReader, MistralReader, Progress, Reader
from loraplex.server.tool_calls.formats import MARKS, ToolFormat
from loraplex.server.tool_calls.held_text import HeldText, first_mark, num_certain_chars
from loraplex.server.tool_calls.json_text import SPACES

_SEPARATORS: Final = SPACES + ";,"
"""Between calls and after them."""


class CallFinder:
    """Reads one answer. `names`: the tools that may be called; where calls have no mark, other objects are
    content."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str], builder: AnswerBuilder) -> None:
        self._format = tool_format
        self._marks = MARKS[tool_format]
        self._names = names
        self._builder = builder
        self._held = HeldText()
        self._reader: Reader | None = None
        self._before_reader = ""
        """Text before the call that is being read: content, if it is none."""
        self._num_calls_before = 0
        self._has_content = False
        self._is_after_call = False

    def push(self, text: str) -> None:
        while text:
            text = self._push_outside(text) if self._reader is None else self._push_inside(self._reader, text)

    def finish(self) -> None:
        """Note that the answer has ended."""
        if self._reader is not None:
            self._give_up(self._reader)
        rest = self._held.take()
        if self._builder.num_calls:
            rest = rest.rstrip(_SEPARATORS)
        self._say(rest)

    def _push_outside(self, text: str) -> str:
        """Take text up to the next call; return the rest."""
        if self._held.add_spaces(text):
            return ""
        text = self._held.take() + text
        if self._marks.is_optional and not self._has_content:
            rest = text.lstrip(_SEPARATORS if self._is_after_call else SPACES)
            if not rest:
                self._held.hold(text)
                return ""
            if rest[0] == "{":
                self._begin(CallReader(self._builder, self._names), text[: -len(rest)])
                return rest
        begin, end = self._marks.begin, self._marks.end
        marks = (begin, end) if end is not None and self._is_after_call else (begin,)
        found = first_mark(text, marks)
        if found is None:
            num_certain = num_certain_chars(text, marks)
            self._say(text[:num_certain])
            self._held.hold(text[num_certain:])
            return ""
        place, mark = found
        said = text[:place].rstrip(SPACES)
        self._say(said)
        rest = text[place + len(mark) :]
        if mark == begin:
            reader = (
                MistralReader(self._builder) if self._format is ToolFormat.MISTRAL else self._call_reader()
            )
            self._begin(reader, text[len(said) : place + len(mark)])
        else:
            self._is_after_call = False
        return rest

    def _call_reader(self) -> CallReader:
        return CallReader(self._builder, self._names if self._marks.is_optional else None)

    def _begin(self, reader: Reader, before: str) -> None:
        self._reader, self._before_reader = reader, before
        self._num_calls_before = self._builder.num_calls

    def _push_inside(self, reader: Reader, text: str) -> str:
        for place, char in enumerate(text):
            progress = reader.push(char)
            if progress is Progress.DONE:
                self._reader, self._is_after_call = None, True
                return text[place + 1 :]
            if progress is Progress.WRONG:
                self._give_up(reader)
                return text[place:]
        return ""

    def _give_up(self, reader: Reader) -> None:
        self._reader = None
        has_called = self._builder.num_calls > self._num_calls_before
        self._is_after_call = has_called
        unused = "".join(reader.unused)
        self._say(unused.strip(_SEPARATORS) if has_called else self._before_reader + unused)

    def _say(self, text: str) -> None:
        if text:
            self._has_content = True
            self._builder.add_content(text)
