"""The folders from which adapters may be loaded by path, and the check that a path stays inside them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Final

from loraplex.adapters.open_file import open_beneath
from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.errors import PathNotAllowedError

_NUM_ATTEMPTS: Final = 3
_IS_LINK: Final = (errno.ELOOP, errno.ENOTDIR)
"""Errors that mean: part of the path has become a symlink since it was resolved, so resolve it again."""


class AllowedPaths:
    """The folders that the operator opened for loading by path; without any, every path is refused."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(dict.fromkeys(Path(os.path.realpath(root)) for root in roots))
        self._working_dir = Path.cwd()

    @property
    def roots(self) -> tuple[Path, ...]:
        return self._roots

    def check(self, path: str | Path) -> Path:
        """Return the resolved path of an adapter folder, or raise PathNotAllowedError.

        Symlinks and `..` are followed first, for the folder and for the two files that will be opened.
        A relative path is searched under each root in turn, then in the working directory. The error is the
        same whether or not the outside path exists, so it cannot be used to probe the disk.
        """
        if not self._roots:
            raise PathNotAllowedError("loading adapters by path is off: no folder was opened for it")
        wanted = Path(path)
        parents = [self._working_dir] if wanted.is_absolute() else [*self._roots, self._working_dir]
        inside = [found for parent in parents if (found := self._resolve_inside(parent / wanted))]
        for candidate in inside:
            if os.path.exists(candidate):  # unlike Path.exists, False where looking is not permitted
                return candidate
        if inside:
            return inside[0]
        raise _outside(path)

    def explain_missing(self, path: str) -> str:
        """Return a message that there is no folder at a path, and where a relative path was searched. It does
        not name the working directory, which is not for a tenant to know."""
        if not self._roots:
            return "no folder is open for loading"
        if Path(path).is_absolute():
            return f"there is no folder {path}"
        roots = ", ".join(map(str, self._roots))
        return (
            f"there is no folder {path} in {roots}, and none in the server's working directory that lies in "
            "a folder open for loading (give an absolute path)"
        )

    def open(self, path: Path) -> FileIO:
        """Open a file that lies inside an allowed folder at the moment of opening, or raise
        PathNotAllowedError.

        `check` alone is not enough: a symlink may be swapped between checking and opening. Here the path is
        resolved, and what it resolves to is opened without following any further link.
        """
        attempts_left = _NUM_ATTEMPTS
        while True:
            resolved = Path(os.path.realpath(path))
            root = next((root for root in self._roots if resolved.is_relative_to(root)), None)
            if root is None:
                raise _outside(path)
            try:
                return open_beneath(root, resolved.relative_to(root))
            except OSError as exc:
                attempts_left -= 1
                if exc.errno not in _IS_LINK or attempts_left == 0:
                    raise

    def _resolve_inside(self, path: Path) -> Path | None:
        try:
            resolved = path.resolve()
            files = [(resolved / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE)]
        except (OSError, RuntimeError, ValueError):  # a symlink loop, a NUL byte, an over-long name
            return None
        return resolved if all(self._is_inside(each) for each in (resolved, *files)) else None

    def _is_inside(self, resolved: Path) -> bool:
        return any(resolved.is_relative_to(root) for root in self._roots)


def _outside(path: str | Path) -> PathNotAllowedError:
    return PathNotAllowedError(f"{str(path)!r} is outside the folders that adapters may be loaded from")
