"""Phrases that several messages share."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from loraplex.core.url_secrets import without_secrets

_MAX_NAMED: Final = 30


def plural(noun: str, number: float) -> str:
    """Return the noun in the form that follows the number: "adapter" after 1, "adapters" otherwise."""
    return noun if number == 1 else f"{noun}s"


def no_server(base_url: str, reason: object) -> str:
    """Return the message for a URL that could not be connected to, with the fix."""
    return (
        f"no server answers at {without_secrets(base_url)} ({reason}); start one with `loraplex serve`, "
        "or name another with --base-url"
    )


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return a message that there is no such name, with similar names, or all known ones if none is
    similar."""
    names, by_lowered = list(dict.fromkeys(known)), defaultdict[str, list[str]](list)
    for each in names:
        by_lowered[each.lower()].append(each)
    near = [each for key in difflib.get_close_matches(name.lower(), by_lowered) for each in by_lowered[key]]
    if near:
        return f"there is no {kind} {name!r}; did you mean {' or '.join(near)}?"
    num_more = len(names) - _MAX_NAMED
    shown = ", ".join(names[:_MAX_NAMED]) or "none"
    more = f" and {num_more:,} more" if num_more > 0 else ""
    return f"there is no {kind} {name!r}; there are {shown}{more}"
