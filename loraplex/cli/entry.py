"""The entry point of the `loraplex` command.

Ctrl-C ends it without a traceback, with the usual exit code of shells, even while Python imports modules and
builds the command, which takes up to a second or two.
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
    if handler is signal.default_int_handler:  # otherwise it is ignored, as in the background of a shell
        signal.signal(signal.SIGINT, _leave)
    from loraplex.cli.main import main as run

    try:
        signal.signal(signal.SIGINT, handler)
        run()
    except KeyboardInterrupt:  # before the command started; later the command handles it
        sys.exit(_EXIT_INTERRUPTED)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(_EXIT_INTERRUPTED)  # at once: a module being imported might catch an exception
