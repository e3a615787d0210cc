"""Writing a file atomically."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the file atomically: readers see the old or the new text. Raises OSError and leaves no
    temporary file then."""
    unfinished = path.with_name(f".{path.name}.new")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # gone already if the replacement succeeded
