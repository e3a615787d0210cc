"""Where servers of this machine keep their decisions, and what the versions in them are called."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Final

from loraplex.adapters.registry import DATABASE_FILE

DEMO_PREFIX: Final = "loraplex-demo-"
"""The state of a demo is in a folder that begins so, among the temporary ones, for as long as it runs."""
_NAMES: Final = (
    "SELECT DISTINCT name FROM adapters WHERE version = ?1 OR instr(canary, ?1) > 0 "
    "OR instr(previous, ?1) > 0 ORDER BY version != ?1, name"
)


def demo_state_dirs() -> list[Path]:
    """Return the state folders of this user's demos that run, the latest first."""
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
    """Return the names that stand for a version, or did: those that still do first. None are known if its
    adapter was unloaded since, or the registry cannot be read."""
    path = state_dir / DATABASE_FILE
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return [name for (name,) in database.execute(_NAMES, (version,))]
    except sqlite3.Error:
        return []
