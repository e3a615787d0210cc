"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]
"""A result file."""


class TableError(Exception):
    """A document or a result file that no table can be made from."""


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *lines]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in rows)
