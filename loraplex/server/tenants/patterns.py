"""Patterns of adapter names, such as `acme-*`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Final

from loraplex.adapters.names import MAX_NAME_CHARS

_PATTERN: Final = re.compile(rf"[A-Za-z0-9._/*?-]{{1,{MAX_NAME_CHARS}}}")


class Patterns:
    """Patterns of which a name has to match one; without any, no name does. `*` stands for any characters,
    `?` for one; upper and lower case differ."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.texts = tuple(texts)

    def __bool__(self) -> bool:
        return bool(self.texts)

    def match(self, name: str) -> bool:
        return bool(self.texts) and self._expression.match(name) is not None

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """Return the patterns that none of these names matches."""
        return [text for text in self.texts if not fnmatch.filter(names, text)]

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        # With the first request: most of the time to read a file of many tenants would be for this.
        return re.compile("|".join(map(fnmatch.translate, self.texts)))


def why_no_pattern(text: str) -> str | None:
    """Return why a text cannot be a pattern; None if it can."""
    if _PATTERN.fullmatch(text):
        return None
    return (
        f"{text[:MAX_NAME_CHARS]!r} can match no adapter: use 1 to {MAX_NAME_CHARS} letters, digits, '.', "
        "'_', '-', '/', and '*' and '?' for any others"
    )
