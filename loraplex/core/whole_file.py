"""Writing a file atomically."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file atomically: readers see the old or the new content. Pipes and devices are written to,
    and of a link the file that it points to is replaced. Raises OSError and leaves no temporary file then."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # gone already if the replacement succeeded
