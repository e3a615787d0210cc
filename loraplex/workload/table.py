"""Reads CSV files with a header line, strictly; .gz or not."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.core.words import plural
from loraplex.workload.errors import WorkloadError
from loraplex.workload.text_files import read_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column to read; `parse` raises ValueError that says what the value must be."""

    name: str
    parse: Callable[[str], Any]


def column_names(path: Path) -> tuple[str, ...]:
    """Return the column names in the first line of the file."""
    for _, row in _rows(path):
        return tuple(name.strip().removeprefix("\ufeff") for name in row)
    raise WorkloadError(f"{path}: the file is empty")


def read_table(path: Path, columns: Sequence[Column]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield (line number, values of these columns) of every row; other columns are ignored."""
    names = column_names(path)
    check_columns(path, names, [column.name for column in columns])
    places = [(column, names.index(column.name)) for column in columns]
    for number, row in _rows(path):
        if number == 1:
            continue
        if len(row) != len(names):
            raise WorkloadError(
                f"{path}:{number}: {len(row)} {plural('value', len(row))} for "
                f"{len(names)} {plural('column', len(names))}"
            )
        try:
            yield number, tuple(_parsed(column, row[place]) for column, place in places)
        except ValueError as error:
            raise WorkloadError(f"{path}:{number}: {error}") from error


def check_columns(path: Path, names: Sequence[str], wanted: Sequence[str]) -> None:
    if missing := [name for name in wanted if name not in names]:
        raise WorkloadError(f"{path}:1: missing column {', '.join(missing)} (there is {', '.join(names)})")


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value.strip()


def whole(least: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        try:
            # Some programs write 12.0 for 12.
            number = int(value) if value.strip().lstrip("+-").isdigit() else _whole_float(value)
        except (ValueError, OverflowError):
            number = least - 1
        if number < least:
            raise ValueError(f"must be a whole number of at least {least}")
        return number

    return parse


def number(*, least: float = 0.0, above: bool = False) -> Callable[[str], float]:
    """Return a parser of finite numbers that are at least, or `above`, `least`."""

    def parse(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not math.isfinite(found) or found < least or (above and found == least):
            raise ValueError(f"must be a number {'above' if above else 'of at least'} {least:g}")
        return found

    return parse


def _whole_float(value: str) -> int:
    found = float(value)
    if found != int(found):
        raise ValueError
    return int(found)


def _parsed(column: Column, value: str) -> Any:
    try:
        return column.parse(value)
    except ValueError as error:
        raise ValueError(f"{column.name} {error}, not {value[:80]!r}") from error


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, values) of nonblank lines. Values do not span lines, so lines can be counted."""
    for number, line in read_lines(path):
        if line.strip():
            try:
                yield number, next(csv.reader((line,), strict=True))
            except csv.Error as error:
                raise WorkloadError(f"{path}:{number}: not CSV ({error})") from error
