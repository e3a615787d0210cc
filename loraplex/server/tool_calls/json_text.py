"""JSON that arrives a character at a time."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

SPACES: Final = " \t\r\n"


class Place(Enum):
    """The place of a character, seen from the value that is being read."""

    BEFORE = auto()
    INSIDE = auto()
    LAST = auto()
    AFTER = auto()
    """It ends a number or a name, and is no part of it."""
    WRONG = auto()
    """No value begins so."""


class ValueScanner:
    """Finds the end of one value. Checks no more than that takes: strings and the depth of brackets."""

    def __init__(self) -> None:
        self._first = ""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, char: str) -> Place:
        """Return where the next character is. After the value's end, do not push again."""
        if not self._first:
            if char in SPACES:
                return Place.BEFORE
            if char in "]},:":
                return Place.WRONG
            self._first = char
        if self._in_string:
            return self._push_in_string(char)
        if char == '"':
            self._in_string = True
        elif char in "[{":
            self._depth += 1
        elif char in "]}":
            if self._depth == 0:
                return Place.AFTER
            self._depth -= 1
            if self._depth == 0:
                return Place.LAST
        elif self._depth == 0 and (char == "," or char in SPACES):
            return Place.AFTER
        return Place.INSIDE

    def _push_in_string(self, char: str) -> Place:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 0:
                return Place.LAST
        return Place.INSIDE
