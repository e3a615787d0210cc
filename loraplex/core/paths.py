"""The folder for cached files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return `$LORAPLEX_CACHE`, or `~/.cache/loraplex`."""
    configured = os.environ.get("LORAPLEX_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "loraplex"
