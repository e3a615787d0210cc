"""How processes end, in words."""

from __future__ import annotations

import contextlib
import signal


def describe_exit(exit_code: int) -> str:
    """A process's return code, as `subprocess` gives it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"killed by signal {-exit_code}"
