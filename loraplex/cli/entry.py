"""Where the `loraplex` command begins.

Ctrl-C ends it without a traceback also while Python imports what it needs and puts the command together,
which takes up to a second or two: with the exit code that shells have for it.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Final

_EXIT_INTERRUPTED: Final = 128 + signal.SIGINT


def main() -> None:
    """Run `loraplex.cli.main.main`."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else it is ignored, in the background of a shell
        signal.signal(signal.SIGINT, _leave)
    from loraplex.cli.main import main as run

    try:
        signal.signal(signal.SIGINT, handler)
        run()
    except KeyboardInterrupt:  # before the command had begun, which handles it otherwise
        sys.exit(_EXIT_INTERRUPTED)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(_EXIT_INTERRUPTED)  # at once: an exception might be caught by what is being imported
