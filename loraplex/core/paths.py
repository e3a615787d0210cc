"""Where things that can be made again are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$LORAPLEX_CACHE`, or `~/.cache/loraplex`."""
    configured = os.environ.get("LORAPLEX_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "loraplex"
