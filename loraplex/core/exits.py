"""Exit codes of loraplex, and exit codes of any process in words."""

from __future__ import annotations

import contextlib
import signal
from typing import Final

EXIT_ENGINE_FAILED: Final = 3
"""Exit code of `serve` when the engine died too often: a supervisor should start the server again."""


def describe_exit(exit_code: int) -> str:
    """Return a process's return code, as `subprocess` gives it, in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"killed by signal {-exit_code}"
