"""The names of the versions in logged decisions."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from loraplex.adapters.registry import DATABASE_FILE

_NAMES: Final = (
    "SELECT DISTINCT name FROM adapters WHERE version = ?1 OR instr(canary, ?1) > 0 "
    "OR instr(previous, ?1) > 0 ORDER BY version != ?1, name"
)


def names_of(state_dir: Path, version: str) -> list[str]:
    """Return the names that stand for a version, or did, present ones first. Empty if its adapter was
    unloaded since, or the registry cannot be read."""
    path = state_dir / DATABASE_FILE
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return [name for (name,) in database.execute(_NAMES, (version,))]
    except sqlite3.Error:
        return []
