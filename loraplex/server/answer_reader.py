"""Reads the text of one choice of a chat: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from loraplex.server.reasoning import ReasoningSplitter
from loraplex.server.tool_calls.answer_delta import AnswerBuilder, AnswerDelta
from loraplex.server.tool_calls.call_finder import CallFinder
from loraplex.server.tool_calls.call_ids import new_call_id
from loraplex.server.tool_calls.formats import ToolFormat


@dataclass(frozen=True, kw_only=True)
class CallReading:
    """The way calls are read. `names`: the tools; `max_calls`: later calls are dropped."""

    tool_format: ToolFormat
    names: Collection[str]
    max_calls: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReasoningReading:
    """The way reasoning is read. `has_begun`: the prompt ends with its beginning. `is_shown`: otherwise it is
    dropped."""

    has_begun: bool = False
    is_shown: bool = True


@dataclass(frozen=True, kw_only=True)
class AnswerReading:
    """Parts that are looked for in the answers of one request; None for nothing."""

    calls: CallReading | None = None
    reasoning: ReasoningReading | None = None


class AnswerReader:
    """Reads one choice. The parts joined are the same however its text is cut into pieces."""

    def __init__(self, reading: AnswerReading) -> None:
        calls, reasoning = reading.calls, reading.reasoning
        make_id = partial(new_call_id, ToolFormat.HERMES if calls is None else calls.tool_format)
        self._builder = AnswerBuilder(make_id, max_calls=None if calls is None else calls.max_calls)
        self._finder = None if calls is None else CallFinder(calls.tool_format, calls.names, self._builder)
        on_answer = self._builder.add_content if self._finder is None else self._finder.push
        self._splitter: ReasoningSplitter | None = None
        if reasoning is not None:
            self._splitter = ReasoningSplitter(
                has_begun=reasoning.has_begun,
                on_reasoning=self._builder.add_reasoning if reasoning.is_shown else _drop,
                on_answer=on_answer,
            )
        self._push = on_answer if self._splitter is None else self._splitter.push

    @property
    def ends_in_call(self) -> bool:
        """Return whether there are calls, and all are complete."""
        return self._builder.ends_in_call

    @property
    def has_calls(self) -> bool:
        return self._builder.num_calls > 0

    def read(self, text: str, *, is_last: bool) -> AnswerDelta:
        """Return what is certain after this text."""
        self._push(text)
        if is_last:
            if self._splitter is not None:
                self._splitter.finish()
            if self._finder is not None:
                self._finder.finish()
        return self._builder.take()


def _drop(text: str) -> None:
    pass
