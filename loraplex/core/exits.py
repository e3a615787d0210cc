"""How processes end: the exit codes of our own, and those of others in words."""

from __future__ import annotations

import contextlib
import signal
from typing import Final

EXIT_ENGINE_FAILED: Final = 3
"""`serve` ends with it when the engine died too often: a supervisor should start the server again."""


def describe_exit(exit_code: int) -> str:
    """A process's return code, as `subprocess` gives it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"killed by signal {-exit_code}"
