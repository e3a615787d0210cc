"""Text that arrives in pieces and may end in the beginning of a mark."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.server.tool_calls.json_text import SPACES


class HeldText:
    """Text that is held back: spaces, and what may begin a mark. A long run of spaces costs no more than its
    length."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._is_space = True

    def add_spaces(self, text: str) -> bool:
        """Hold more text if that and all that is held are spaces; return whether they are."""
        if not self._is_space or text.strip(SPACES):
            return False
        self._parts.append(text)
        return True

    def hold(self, text: str) -> None:
        self._parts, self._is_space = [text], not text.strip(SPACES)

    def take(self) -> str:
        """Return what is held, which is then held no more."""
        text = "".join(self._parts)
        self._parts, self._is_space = [], True
        return text


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first mark of a text begins, and which it is."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found, default=None)


def num_certain_chars(text: str, marks: Sequence[str]) -> int:
    """Return how many characters surely come before any mark, and before spaces that come before one."""
    longest = max(
        (length for mark in marks for length in range(1, len(mark)) if text.endswith(mark[:length])),
        default=0,
    )
    return len(text[: len(text) - longest].rstrip(SPACES))
