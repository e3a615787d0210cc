"""The folder in which a server keeps its state, if no other is chosen."""

from __future__ import annotations

import os
from pathlib import Path


def default_state_dir() -> Path:
    """Return `$LORAPLEX_STATE`, or `loraplex` in the user's folder for program state."""
    if configured := os.environ.get("LORAPLEX_STATE"):
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "loraplex"


def demo_state_dir() -> Path:
    """Return the demo's state folder: its own, so that a demo changes nothing that other servers serve."""
    return default_state_dir() / "demo"
