"""Files that are there in full, or as they were."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replaces the file in one go: whoever reads it meanwhile finds the old or the new one. Raises OSError,
    and leaves nothing behind then."""
    unfinished = path.with_name(f".{path.name}.new")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # unless it has moved to its place
