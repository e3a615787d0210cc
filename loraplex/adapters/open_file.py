"""Opening a checkpoint's files without waiting for pipes, and if required without following symlinks."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Final

OpenFile = Callable[[Path], FileIO]
"""Opens a regular file for reading. Raises OSError, or an error of its own if the path is not allowed."""

# Without O_NONBLOCK, opening a named pipe would wait for a writer forever; regular files ignore it.
_FILE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
# O_PATH, if available: passing through a folder needs no permission to list it.
_FOLDER: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


class NotRegularFileError(OSError):
    """A folder, pipe, socket or device where a file should be."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file", str(path))


def open_regular(path: Path) -> FileIO:
    """Open a file, following symlinks anywhere."""
    return _checked(os.open(path, _FILE), path)


def open_beneath(root: Path, inner: Path) -> FileIO:
    """Open `root / inner` without following a symlink below `root`, so the file is inside it for sure.

    A symlink on the way is an OSError (ELOOP or ENOTDIR), even one that was put there a moment ago.
    """
    if not inner.parts:
        raise NotRegularFileError(root)
    *folders, name = inner.parts
    folder_fd = os.open(root, _FOLDER)
    try:
        for each in folders:
            next_fd = os.open(each, _FOLDER | os.O_NOFOLLOW, dir_fd=folder_fd)
            os.close(folder_fd)
            folder_fd = next_fd
        file_fd = os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=folder_fd)
    finally:
        os.close(folder_fd)
    return _checked(file_fd, root / inner)


def _checked(fd: int, path: Path) -> FileIO:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularFileError(path)
    return FileIO(fd)
