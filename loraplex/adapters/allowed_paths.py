"""The folders from which adapters may be loaded by path, and the check that a path stays inside them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.errors import PathNotAllowedError


class AllowedPaths:
    """Folders the operator opened for loading by path. None opened: every path is refused."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(dict.fromkeys(root.resolve() for root in roots))

    @property
    def roots(self) -> tuple[Path, ...]:
        return self._roots

    def check(self, path: str | Path) -> Path:
        """The resolved path of an adapter folder, or PathNotAllowedError.

        Symlinks and `..` are followed first, for the folder and for the two files that will be opened.
        A relative path is looked for under each root in turn. The error is the same whether or not
        the outside path exists, so it cannot be used to probe the disk.
        """
        if not self._roots:
            raise PathNotAllowedError("loading adapters by path is off: no folder was opened for it")
        wanted = Path(path)
        if wanted.is_absolute():
            resolved = self._resolve_inside(wanted)
            if resolved is not None:
                return resolved
        else:
            inside = [found for root in self._roots if (found := self._resolve_inside(root / wanted))]
            for candidate in inside:
                if os.path.exists(candidate):  # unlike Path.exists, False where looking is not permitted
                    return candidate
            if inside:
                return inside[0]
        raise PathNotAllowedError(f"{str(path)!r} is outside the folders that adapters may be loaded from")

    def _resolve_inside(self, path: Path) -> Path | None:
        try:
            resolved = path.resolve()
            files = [(resolved / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE)]
        except (OSError, RuntimeError, ValueError):  # a symlink loop, a NUL byte, an over-long name
            return None
        return resolved if all(self._is_inside(each) for each in (resolved, *files)) else None

    def _is_inside(self, resolved: Path) -> bool:
        return any(resolved.is_relative_to(root) for root in self._roots)
