"""Files that are read once though many workloads are made of them, as a search for a rate does."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from stat import S_ISREG
from typing import Final, TypeVar

T = TypeVar("T")

_NUM_KEPT: Final = 2
"""Files of each kind."""


def read_once(read: Callable[[Path], T]) -> Callable[[Path], T]:
    """Keep what a function has read of its last files until they change. Callers must not change it."""

    @lru_cache(maxsize=_NUM_KEPT)
    def kept(path: Path, size: int, changed_ns: int) -> T:
        return read(path)

    @wraps(read)
    def read_or_kept(path: Path) -> T:
        try:
            found = path.stat()
        except OSError:
            return read(path)  # which says what is wrong with it
        if not S_ISREG(found.st_mode):  # a pipe, say
            return read(path)
        return kept(path, found.st_size, found.st_mtime_ns)

    return read_or_kept
