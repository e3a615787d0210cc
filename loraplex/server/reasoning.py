"""Reasoning that a model writes before its answer: <think> ... </think>, as Qwen3 does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from loraplex.server.tool_calls.held_text import HeldText, num_certain_chars
from loraplex.server.tool_calls.json_text import SPACES

THINK: Final = "<think>"
END_THINK: Final = "</think>"


class ReasoningSplitter:
    """Tells reasoning from the answer after it, in text that arrives in any pieces. Spaces around either are
    dropped where there is reasoning. `has_begun`: the prompt ends with the beginning of the reasoning."""

    def __init__(
        self, *, has_begun: bool, on_reasoning: Callable[[str], None], on_answer: Callable[[str], None]
    ) -> None:
        self._on_reasoning = on_reasoning
        self._on_answer = on_answer
        self._take: Callable[[str], None] = self._take_reasoning if has_begun else self._take_start
        self._held = HeldText()
        self._is_first = True
        """True until something but spaces comes after the last mark."""

    def push(self, text: str) -> None:
        if self._take == self._on_answer or not self._held.add_spaces(text):
            self._take(self._held.take() + text)

    def finish(self) -> None:
        """Note that the answer has ended."""
        held = self._held.take()
        if self._take == self._take_reasoning:
            self._on_reasoning(held.strip(SPACES) if self._is_first else held.rstrip(SPACES))
        elif self._take == self._take_start:
            self._on_answer(held)

    def _take_start(self, text: str) -> None:
        stripped = text.lstrip(SPACES)
        if stripped.startswith(THINK):
            self._take = self._take_reasoning
            self._take(stripped.removeprefix(THINK))
        elif THINK.startswith(stripped):  # or it is empty
            self._held.hold(text)
        else:
            self._take = self._on_answer
            self._on_answer(text)

    def _take_reasoning(self, text: str) -> None:
        text = text.lstrip(SPACES) if self._is_first else text
        reasoning, mark, answer = text.partition(END_THINK)
        if not mark:
            num_certain = num_certain_chars(text, (END_THINK,))
            reasoning = text[:num_certain]
            self._held.hold(text[num_certain:])
        if mark:
            reasoning = reasoning.rstrip(SPACES)
        if reasoning:
            self._is_first = False
            self._on_reasoning(reasoning)
        if mark:
            self._take, self._is_first = self._take_answer, True
            self._take(answer)

    def _take_answer(self, text: str) -> None:
        """Drop spaces at the beginning of an answer that follows reasoning."""
        if text := text.lstrip(SPACES):
            self._take = self._on_answer
            self._on_answer(text)
