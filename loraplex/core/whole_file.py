"""Writing a file atomically."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, mode: int | None = None) -> None:
    """Replace the file atomically: readers see the old or the new content. Pipes and devices are written to,
    and of a link the file that it points to is replaced. Raises OSError and leaves no temporary file then.

    `mode`: the permissions of a new file, if not the usual ones. A file that is replaced keeps its own, and
    its owner where that is permitted.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        before = path.stat() if path.exists() else None
        if before is not None:
            mode = stat.S_IMODE(before.st_mode)
        if mode is not None:
            unfinished.touch(0o600)
        unfinished.write_bytes(data)
        if before is not None and before.st_uid != os.geteuid():
            with contextlib.suppress(PermissionError):
                os.chown(unfinished, before.st_uid, before.st_gid)
        if mode is not None:
            unfinished.chmod(mode)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # gone already if the replacement succeeded
