"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Result = dict[str, Any]
"""The contents of a result file."""


class TableError(Exception):
    """A table cannot be made from a document or a result file."""


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *lines]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in rows)


def when_and_what(result: Result) -> tuple[str, str]:
    """Return the dates and the commits of a result's sections, in words."""
    sections = list(result.values())
    dates = " to ".join(sorted({each["date"][:10] for each in sections}))
    return dates, ", ".join(dict.fromkeys(each["git_commit"] or "unknown" for each in sections))


def span(values: Iterable[float], form: str) -> str:
    """Return the smallest and the largest of the values, or one figure if both read the same."""
    found = sorted(values)
    return " to ".join(dict.fromkeys((f"{found[0]:{form}}", f"{found[-1]:{form}}"))) if found else "-"
