"""What a command does when the reader of its output has left, as in `loraplex ... | head`: it ends quietly,
or goes on without a reader if it is a server."""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any, Final, TextIO

EXIT_CLOSED_PIPE: Final = 141
"""What a shell reports of a program that SIGPIPE ended: 128 + 13."""


def end_with_the_reader() -> None:
    """Have a write to a closed stdout end the process, with no message. Only for a stdout that is a pipe.

    Not by restoring the default action of SIGPIPE: a server would end with the first client that hangs up.
    """
    sys.stdout = _with_pipe(sys.stdout, _EndingPipe)


def outlive_the_reader() -> None:
    """Have what is written to a closed stdout or stderr go nowhere, for a command that has more to do.

    Stderr too, for `2>&1 | head`: a line that could not be written would change the exit code at the end.
    """
    sys.stdout = _with_pipe(sys.stdout, _Pipe)
    sys.stderr = _with_pipe(sys.stderr, _Pipe)


def drop_output(descriptor: int) -> None:
    """Have all that is still written to a descriptor go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _with_pipe(old: TextIO, kind: type[_Pipe]) -> TextIO:
    """Return a stream to the same descriptor through `kind`; the stream itself if that is no pipe."""
    try:
        descriptor = old.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError, AttributeError):
        return old  # no file is behind it
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return old
    old.flush()
    buffer = io.BufferedWriter(kind(descriptor, "w", closefd=False))
    return io.TextIOWrapper(
        buffer, encoding=old.encoding, errors=old.errors, line_buffering=old is sys.stderr
    )


class _Pipe(io.FileIO):
    """A pipe that becomes the null device when its reader leaves."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            # Also for what is still in buffers, of which the interpreter would complain at its end.
            drop_output(self.fileno())
            self._on_closed()
            return len(data)

    def _on_closed(self) -> None:
        """Called once, after a write has failed."""


class _EndingPipe(_Pipe):
    """A pipe whose first failed write is the last thing that happens."""

    def _on_closed(self) -> None:
        raise SystemExit(EXIT_CLOSED_PIPE)
