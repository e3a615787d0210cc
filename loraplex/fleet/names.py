"""Names that a user may misspell."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that there is no such thing, with the names that come near it, or all there are."""
    names = list(known)
    near = difflib.get_close_matches(name, names)
    advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
    return f"there is no {kind} {name!r}; {advice}"
