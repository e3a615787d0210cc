"""Tables that fit the width of the terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_GAP: Final = 2
_MIN_COLUMNS: Final = 4

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """The values of one key. `show` formats a value of type `kind`."""

    key: str
    heading: str
    kind: type
    show: Callable[[Any], str]

    def cell(self, row: Row) -> str:
        value = row.get(self.key)
        if value is None:
            return "-"
        return printable(self.show(value) if isinstance(value, self.kind) else str(value))


def text_column(key: str, show: Callable[[str], str] = str) -> Column:
    return Column(key=key, heading=key.replace("_", " "), kind=str, show=show)


def number_column(
    key: str, *, heading: str | None = None, show: Callable[[int], str] = "{:,}".format
) -> Column:
    return Column(key=key, heading=heading or key.replace("_", " "), kind=int, show=show)


def print_table(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Print the columns that fit a terminal: dropping the last columns reads better than wrapped lines.

    A pipe has no width and gets all columns, unless COLUMNS is set.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    shown = columns
    if console.is_terminal or "COLUMNS" in os.environ:
        shown = _fitting(rows, columns, console.width)
    else:
        console.width = sum(_width(rows, column) + _GAP for column in columns)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for column in shown:
        table.add_column(column.heading, overflow="fold", justify="left" if column.kind is str else "right")
    for row in rows:
        table.add_row(*(Text(column.cell(row)) for column in shown))
    console.print(table)
    if left_out := [column.heading for column in columns[len(shown) :]]:
        console.print(f"Not shown: {', '.join(left_out)}; see a wider terminal, or --json.", style="dim")


def printable(text: str) -> str:
    """Replace control characters: names may come from untrusted files and must not control the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _fitting(rows: Sequence[Row], columns: Sequence[Column], width: int) -> Sequence[Column]:
    """Return the first columns that fit side by side, and always a few."""
    widths = [_width(rows, column) for column in columns]
    num_shown = len(columns)
    while num_shown > _MIN_COLUMNS and sum(widths[:num_shown]) + _GAP * (num_shown - 1) > width:
        num_shown -= 1
    return columns[:num_shown]


def _width(rows: Sequence[Row], column: Column) -> int:
    from rich.cells import cell_len

    return max(cell_len(text) for text in (column.heading, *map(column.cell, rows)))
