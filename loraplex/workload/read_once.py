"""Caches files that many workloads are made of, for instance in a search for a rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from stat import S_ISREG
from typing import Final, TypeVar

T = TypeVar("T")

_NUM_KEPT: Final = 2
"""Number of files of each kind in the cache."""


def read_once(read: Callable[[Path], T]) -> Callable[[Path], T]:
    """Cache a reader's results for its last files until these change. Callers must not modify the results."""

    @lru_cache(maxsize=_NUM_KEPT)
    def kept(path: Path, size: int, changed_ns: int) -> T:
        return read(path)

    @wraps(read)
    def read_or_kept(path: Path) -> T:
        try:
            found = path.stat()
        except OSError:
            return read(path)  # raises an error that says what is wrong
        if not S_ISREG(found.st_mode):  # such as a pipe
            return read(path)
        return kept(path, found.st_size, found.st_mtime_ns)

    return read_or_kept
