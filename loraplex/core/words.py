"""Phrases that several messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def plural(noun: str, number: float) -> str:
    """Return the noun in the form that follows the number: "adapter" after 1, "adapters" otherwise."""
    return noun if number == 1 else f"{noun}s"


def no_server(base_url: str, reason: object) -> str:
    """Return the message for a URL that could not be connected to, with the fix."""
    return (
        f"no server answers at {base_url} ({reason}); start one with `loraplex serve`, "
        "or name another with --base-url"
    )


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return a message that there is no such name, with similar names, or all known ones if none is
    similar."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names)
    advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
    return f"there is no {kind} {name!r}; {advice}"
