"""Additions to one choice of a chat: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class CallDelta:
    """A part of one call. `call_id` and `name` are set in its first part only."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(kw_only=True)
class AnswerDelta:
    """`calls` has at most one entry for each call."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class AnswerBuilder:
    """Collects what parsers find until it is taken. `max_calls`: later calls are dropped."""

    def __init__(self, new_call_id: Callable[[], str], *, max_calls: int | None = None) -> None:
        self._new_call_id = new_call_id
        self._max_calls = max_calls
        self._num_begun = 0
        self._num_ended = 0
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[str] = []

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun, including dropped ones."""
        return self._num_begun

    @property
    def ends_in_call(self) -> bool:
        """Return whether there are calls, and all are complete."""
        return 0 < self._num_begun == self._num_ended

    def add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def add_content(self, text: str) -> None:
        self._content.append(text)

    def begin_call(self, name: str) -> None:
        self._close_arguments()
        if not self._drops_next:
            call_id = self._new_call_id()
            self._calls.append(CallDelta(index=self._num_begun, call_id=call_id, name=name))
        self._num_begun += 1

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call that was begun last."""
        if self._max_calls is None or self._num_begun <= self._max_calls:
            self._arguments.append(text)

    def end_call(self) -> None:
        self._num_ended += 1

    def take(self) -> AnswerDelta:
        """Return everything since it was taken last."""
        self._close_arguments()
        taken = AnswerDelta(
            reasoning="".join(self._reasoning), content="".join(self._content), calls=self._calls
        )
        self._reasoning, self._content, self._calls = [], [], []
        return taken

    @property
    def _drops_next(self) -> bool:
        return self._max_calls is not None and self._num_begun >= self._max_calls

    def _close_arguments(self) -> None:
        if not self._arguments:
            return
        index = self._num_begun - 1
        if not self._calls or self._calls[-1].index != index:
            self._calls.append(CallDelta(index=index))
        self._calls[-1].arguments += "".join(self._arguments)
        self._arguments = []
