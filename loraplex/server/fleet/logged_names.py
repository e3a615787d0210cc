"""The places where servers of this machine keep their decisions, and the names of the versions in them."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Final

from loraplex.adapters.registry import DATABASE_FILE

DEMO_PREFIX: Final = "loraplex-demo-"
"""Prefix of the temporary folder that holds the state of a demo while it runs."""
_NAMES: Final = (
    "SELECT DISTINCT name FROM adapters WHERE version = ?1 OR instr(canary, ?1) > 0 "
    "OR instr(previous, ?1) > 0 ORDER BY version != ?1, name"
)


def demo_state_dirs() -> list[Path]:
    """Return the state folders of this user's running demos, the latest first."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{DEMO_PREFIX}*"):
        try:
            status = path.lstat()
        except FileNotFoundError:  # it ended just now
            continue
        if status.st_uid == os.getuid() and path.is_dir():
            found.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def names_of(state_dir: Path, version: str) -> list[str]:
    """Return the names that stand for a version, or did, present ones first. Empty if its adapter was
    unloaded since, or the registry cannot be read."""
    path = state_dir / DATABASE_FILE
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return [name for (name,) in database.execute(_NAMES, (version,))]
    except sqlite3.Error:
        return []
