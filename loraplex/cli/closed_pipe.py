"""Ends a command quietly when whoever reads its output has left: `loraplex ... | head`."""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any, Final, NoReturn

EXIT_CLOSED_PIPE: Final = 141
"""What a shell reports of a program that SIGPIPE ended: 128 + 13."""


def end_with_the_reader() -> None:
    """Have a write to a closed stdout end the process, with no message. Only for a stdout that is a pipe.

    Not by restoring the default action of SIGPIPE: a server would end with the first client that hangs up.
    """
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return  # no file is behind it
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return
    old = sys.stdout
    old.flush()
    buffer = io.BufferedWriter(_Pipe(old.fileno(), "w", closefd=False))
    sys.stdout = io.TextIOWrapper(buffer, encoding=old.encoding, errors=old.errors)


class _Pipe(io.FileIO):
    """A pipe whose first failed write is the last thing that happens."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            self._end()

    def _end(self) -> NoReturn:
        # What is still in buffers goes nowhere: the interpreter would complain of it at its end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        raise SystemExit(EXIT_CLOSED_PIPE)
