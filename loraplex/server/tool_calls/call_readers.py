"""Readers of calls as models write them, a character at a time:

    CallReader        {"name": "weather", "arguments": {"city": "Oslo"}}
    CallListReader    [{"name": "weather", "arguments": {"city": "Oslo"}}, ...]
    NamedCallReader   weather[ARGS]{"city": "Oslo"}

A call begins when its name and the first character of its arguments are known; from there on its arguments
are passed on as they come, whatever they are. What turns out to be no call before that is content.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Any, Final, Protocol

import msgspec

from loraplex.server.tool_calls.answer_delta import AnswerBuilder
from loraplex.server.tool_calls.json_text import SPACES, Place, ValueScanner

_NAME_KEY: Final = "name"
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_SIDE_KEYS: Final = ("type", "id")
_NO_ARGUMENTS: Final = "{}"
_ARGUMENTS_MARK: Final = "[ARGS]"
_ID_MARK: Final = "[CALL_ID]"
_MAX_NAME_CHARS: Final = 512
_NAME: Final = re.compile(r"[^\s\[\]{}\"]+")


class Progress(Enum):
    READING = auto()
    DONE = auto()
    """The character was the last one of the calls."""
    WRONG = auto()
    """The character is no part of a call."""


class Reader(Protocol):
    @property
    def unused(self) -> list[str]:
        """The characters that became no part of a call; content, if no call comes of them."""
        ...

    def push(self, char: str) -> Progress: ...


class _State(Enum):
    OPENING = auto()
    BEFORE_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER_VALUE = auto()


class CallReader:
    """Reads one call, an object. `names`: if given, an object is a call only if it names one of these and has
    no keys of other objects before its arguments."""

    def __init__(self, builder: AnswerBuilder, names: Collection[str] | None = None) -> None:
        self._builder = builder
        self._names = names
        self.unused: list[str] = []
        self._state = _State.OPENING
        self._scanner = ValueScanner()
        self._text: list[str] = []
        """The key or value that is being read."""
        self._key = ""
        self._name: str | None = None
        self._held_arguments: str | None = None
        """Arguments that came before the name."""
        self._has_begun = False
        self._is_passing = False
        """True while a value is read that is passed on as it comes."""

    def push(self, char: str) -> Progress:
        progress = self._push(char)
        if not self._has_begun and progress is not Progress.WRONG:
            self.unused.append(char)
        if self._has_begun:
            self.unused.clear()
        if progress is Progress.DONE or (progress is Progress.WRONG and self._has_begun):
            self._builder.end_call()
        return progress

    def _push(self, char: str) -> Progress:
        match self._state:
            case _State.KEY | _State.VALUE:
                return self._push_in_value(char)
            case _ if char in SPACES:
                return Progress.READING
            case _State.OPENING if char == "{":
                self._state = _State.BEFORE_KEY
            case _State.BEFORE_KEY if char == '"':
                self._begin_value(_State.KEY)
                return self._push_in_value(char)
            case _State.COLON if char == ":":
                self._begin_value(_State.VALUE)
            case _State.AFTER_VALUE if char == ",":
                self._state = _State.BEFORE_KEY
            case _State.BEFORE_KEY | _State.AFTER_VALUE if char == "}":
                return self._end()
            case _:
                return Progress.WRONG
        return Progress.READING

    def _begin_value(self, state: _State) -> None:
        self._state, self._scanner, self._text = state, ValueScanner(), []
        self._is_passing = False

    def _push_in_value(self, char: str) -> Progress:
        place = self._scanner.push(char)
        if place is Place.BEFORE:
            return Progress.READING
        if place is Place.WRONG:
            return Progress.WRONG
        if place is not Place.AFTER:
            self._add(char)
        if place is Place.INSIDE:
            return Progress.READING
        is_key = self._state is _State.KEY
        self._state = _State.COLON if is_key else _State.AFTER_VALUE
        is_right = self._take_key() if is_key else self._is_passing or self._take_value()
        if not is_right:
            return Progress.WRONG
        return self._push(char) if place is Place.AFTER else Progress.READING

    def _add(self, char: str) -> None:
        begins_arguments = not self._text and self._state is _State.VALUE and self._key in _ARGUMENT_KEYS
        if begins_arguments and char in "{[" and self._name is not None and not self._has_begun:
            self._begin_call()
            self._is_passing = True
        if self._is_passing:
            self._builder.add_arguments(char)
        self._text.append(char)

    def _take_key(self) -> bool:
        key = _decoded(self._text)
        if not isinstance(key, str):
            return False
        self._key = key
        return self._names is None or key in (_NAME_KEY, *_ARGUMENT_KEYS, *_SIDE_KEYS)

    def _take_value(self) -> bool:
        """Take a value that was read as a whole. Return whether a call may have it."""
        if self._has_begun:
            return True  # of no use
        if self._key == _NAME_KEY:
            name = _decoded(self._text)
            if not isinstance(name, str) or not name or not (self._names is None or name in self._names):
                return False
            self._name = name
        elif self._key in _ARGUMENT_KEYS:
            self._held_arguments = _as_arguments("".join(self._text))
        if self._name is not None and self._held_arguments is not None:
            self._begin_call(self._held_arguments)
        return True

    def _end(self) -> Progress:
        if self._name is None:
            return Progress.WRONG
        if not self._has_begun:
            if self._names is not None:
                return Progress.WRONG  # an object that has a name, and no arguments
            self._begin_call(_NO_ARGUMENTS)
        return Progress.DONE

    def _begin_call(self, arguments: str = "") -> None:
        assert self._name is not None
        self._has_begun = True
        self._builder.begin_call(self._name)
        self._builder.add_arguments(arguments)


class CallListReader:
    """Reads a list of calls."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder
        self._own: list[str] = []
        self._is_open = False
        self._call: CallReader | None = None

    @property
    def unused(self) -> list[str]:
        return self._own + ([] if self._call is None else self._call.unused)

    def push(self, char: str) -> Progress:
        if self._call is not None:
            num_calls = self._builder.num_calls
            progress = self._call.push(char)
            if self._builder.num_calls > num_calls:
                self._own.clear()
            if progress is Progress.DONE:
                self._call = None
            return Progress.READING if progress is Progress.DONE else progress
        if self._is_open and char == "]":
            return Progress.DONE
        if self._is_open and char == "{":
            self._call = CallReader(self._builder)
            return self._call.push(char)
        if char in SPACES or char == ("," if self._is_open else "["):
            self._is_open = self._is_open or char == "["
            self._own.append(char)
            return Progress.READING
        return Progress.WRONG


class NamedCallReader:
    """Reads a name, marks that are special tokens, and arguments."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder
        self.unused: list[str] = []
        self._scanner: ValueScanner | None = None

    def push(self, char: str) -> Progress:
        if self._scanner is None:
            if char == "{":
                return self._begin()
            self.unused.append(char)
            return Progress.WRONG if len(self.unused) > _MAX_NAME_CHARS else Progress.READING
        self._builder.add_arguments(char)
        if self._scanner.push(char) is not Place.LAST:
            return Progress.READING
        self._builder.end_call()
        return Progress.DONE

    def _begin(self) -> Progress:
        head = "".join(self.unused).strip()
        name = head.partition(_ARGUMENTS_MARK)[0].partition(_ID_MARK)[0].strip()
        if _NAME.fullmatch(name) is None:
            return Progress.WRONG
        self.unused.clear()
        self._scanner = ValueScanner()
        self._builder.begin_call(name)
        return self.push("{")


class MistralReader:
    """Reads what follows Mistral's mark: a list of calls, one call, or a name with arguments."""

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder
        self._num_calls_before = builder.num_calls
        self._spaces: list[str] = []
        self._reader: Reader | None = None

    @property
    def unused(self) -> list[str]:
        spaces = self._spaces if self._builder.num_calls == self._num_calls_before else []
        return spaces + ([] if self._reader is None else self._reader.unused)

    def push(self, char: str) -> Progress:
        if self._reader is None:
            if char in SPACES:
                self._spaces.append(char)
                return Progress.READING
            self._reader = _reader_of(char, self._builder)
        return self._reader.push(char)


def _reader_of(first: str, builder: AnswerBuilder) -> Reader:
    if first == "[":
        return CallListReader(builder)
    return CallReader(builder) if first == "{" else NamedCallReader(builder)


def _as_arguments(text: str) -> str:
    """Return a value as the text of arguments. Some models write the text of an object, as a string."""
    value = _decoded([text])
    if value is None:
        return _NO_ARGUMENTS if text == "null" else text
    return (value or _NO_ARGUMENTS) if isinstance(value, str) else text


def _decoded(parts: list[str]) -> Any:
    """Return what a text says as JSON; None if it is wrong."""
    try:
        return msgspec.json.decode("".join(parts))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
