"""The Python that child processes run on."""

from __future__ import annotations

import os
import sys


def same_python() -> list[str]:
    """Return the command of this Python. A child looks into the current folder only if this process does: a
    stray torch.py there must not shadow the real one."""
    sees_cwd = "" in sys.path or os.getcwd() in sys.path
    return [sys.executable] if sees_cwd else [sys.executable, "-P"]
