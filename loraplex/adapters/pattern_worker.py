"""Applies regular expressions to module names; also a script, so that a slow pattern can be stopped.

As a script it reads one JSON object {"patterns": [[regex, full], ...], "keys": [...]} from stdin and
answers with {"table": ...} or {"failed": [pattern index, reason]}. It imports only the standard library,
so that it starts in milliseconds.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Sequence


class BadPatternError(Exception):
    """Pattern number `index` is not a regular expression."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


def match_all(patterns: Sequence[tuple[str, bool]], keys: Sequence[str]) -> list[list[str | None]]:
    """Return table[pattern][key]: None without a match, else the text of the group `idx` ("" if there is
    none).

    The flag beside a regex says whether it has to match the whole key or only its beginning.
    """
    table: list[list[str | None]] = []
    for index, (regex, full) in enumerate(patterns):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled = re.compile(regex)
        except (re.error, RecursionError, OverflowError, MemoryError) as exc:
            raise BadPatternError(index, str(exc) or type(exc).__name__) from exc
        match = compiled.fullmatch if full else compiled.match
        row: list[str | None] = []
        for key in keys:
            found = match(key)
            row.append(None if found is None else found.groupdict().get("idx") or "")
        table.append(row)
    return table


def _main() -> None:
    request = json.load(sys.stdin)
    try:
        answer: dict[str, object] = {"table": match_all(request["patterns"], request["keys"])}
    except BadPatternError as exc:
        answer = {"failed": [exc.index, str(exc)]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
