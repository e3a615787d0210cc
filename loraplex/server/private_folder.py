"""Folders of this process that no other user can enter, and that do not outlive it for long.

A killed process removes nothing. So each folder holds a file that its owner has locked, and the next process
that creates a folder removes those whose lock is not held. Process ids would not do: another container that
shares the parent folder has its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

_PREFIX: Final = "loraplex-"
_OWNER: Final = "owner"
"""Name of the locked file. A folder without one is not ours, or is just being created."""


class PrivateFolder:
    """A folder of mode 0700 at the path `name`, until `cleanup`."""

    def __init__(self, parent: str, kind: str = "") -> None:
        """`kind`: a word that becomes part of its name."""
        remove_abandoned(Path(parent))
        prefix = f"{_PREFIX}{kind}-" if kind else _PREFIX
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
        self.name = self._folder.name
        self._lock = _locked(Path(self.name))

    def cleanup(self) -> None:
        """Remove the folder. Idempotent."""
        self._folder.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that no longer exist."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, gone, or its owner lives
            found = folder.lstat()
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                continue
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """Return the descriptor that holds the lock of a folder; None where files cannot be locked, in which case
    the folder has no owner file and others never remove it."""
    unlocked = folder / f"{_OWNER}.new"
    lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder / _OWNER)  # locked before it gets its name
    except OSError:
        os.close(lock)
        return None
    return lock
