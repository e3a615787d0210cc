"""Where the `loraplex` command begins.

Ctrl-C ends it without a traceback also while Python imports what it needs, which takes a second or two.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run `loraplex.cli.main.main`."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else it is ignored, in the background of a shell
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from loraplex.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()
