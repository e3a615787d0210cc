"""Text that arrives in pieces and may end in the beginning of a mark."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.server.tool_calls.json_text import SPACES


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
