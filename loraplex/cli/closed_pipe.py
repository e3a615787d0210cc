"""Handling of a closed output pipe, as in `loraplex ... | head`: a command ends quietly, a server goes on."""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any, Final, TextIO

EXIT_CLOSED_PIPE: Final = 141
"""The exit code that shells report for a program ended by SIGPIPE: 128 + 13."""


def end_with_the_reader() -> None:
    """End the process without a message on a write to a closed stdout. Only if stdout is a pipe.

    The default action of SIGPIPE is not restored: a server would end with the first client that hangs up.
    """
    sys.stdout = _with_pipe(sys.stdout, _EndingPipe)


def outlive_the_reader() -> None:
    """Discard output to a closed stdout or stderr, for a command that has more to do.

    Stderr too, for `2>&1 | head`: a line that could not be written would change the exit code at the end.
    """
    sys.stdout = _with_pipe(sys.stdout, _Pipe)
    sys.stderr = _with_pipe(sys.stderr, _Pipe)


def drop_output(descriptor: int) -> None:
    """Discard everything still written to a descriptor."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _with_pipe(old: TextIO, kind: type[_Pipe]) -> TextIO:
    """Return a stream to the same descriptor through `kind`; the stream itself if it is not a pipe."""
    try:
        descriptor = old.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError, AttributeError):
        return old  # not backed by a file
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return old
    old.flush()
    buffer = io.BufferedWriter(kind(descriptor, "w", closefd=False))
    return io.TextIOWrapper(
        buffer, encoding=old.encoding, errors=old.errors, line_buffering=old is sys.stderr
    )


class _Pipe(io.FileIO):
    """A pipe that becomes the null device when its reader closes it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            # Covers data still in buffers, which the interpreter would complain about at exit.
            drop_output(self.fileno())
            self._on_closed()
            return len(data)

    def _on_closed(self) -> None:
        """Called once, after the first failed write."""


class _EndingPipe(_Pipe):
    """A pipe whose first failed write ends the process."""

    def _on_closed(self) -> None:
        raise SystemExit(EXIT_CLOSED_PIPE)
