"""The decisions of a fleet on disk: the latest ones, with all that they were made from.

A file holds the events of a routing from its beginning, one a line. When it has become long, the routing
begins anew in the next file, so that each can be read by itself; the one before is kept.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from loraplex.core.errors import UserError
from loraplex.server.fleet.routing_events import RoutingEvent, decode_event, encode_event

logger = logging.getLogger(__name__)

FOLDER: Final = "decisions"
_MAX_EVENTS: Final = 200_000
"""In one file: some 20 MB, of about 50,000 requests."""
_MAX_FILES: Final = 8
"""That are kept in all, of this server and of others on the same state folder."""


class DecisionLog:
    """Events on their way to a file. Recording takes no I/O; what was recorded is taken, and written by any
    thread."""

    def __init__(self, state_dir: Path, max_events: int = _MAX_EVENTS) -> None:
        self._folder = state_dir / FOLDER
        self._max_events = max_events
        # Two servers on the folder may have one process id, in containers of their own.
        self._server = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._number = 0
        self._num_events = 0
        self._lines: list[bytes] = []
        self._is_broken = False
        self._is_lost = False
        self._is_beginning = True

    @property
    def is_full(self) -> bool:
        """Tell whether the routing should begin anew, in the next file: this one is long, or was deleted."""
        return self._num_events >= self._max_events or self._is_lost

    def record(self, event: RoutingEvent) -> None:
        if not self._is_broken:
            self._lines.append(encode_event(event))
            self._num_events += 1

    def begin(self, events: Iterable[RoutingEvent]) -> None:
        """Begin the next file with the events that a routing begins with."""
        self.write(self.take())
        self._is_beginning, self._is_lost = True, False
        self._number += 1
        self._num_events = 0
        for event in events:
            self.record(event)
        # A fleet that knows more adapters than a file should have events must not begin anew all the time.
        self._num_events = 0

    def take(self) -> list[bytes]:
        """Return what was recorded since the last call; on the thread that records."""
        lines, self._lines = self._lines, []
        return lines

    def write(self, lines: list[bytes]) -> None:
        """Write what was taken; on any thread, one call at a time. A disk that fails ends the log, not the
        server."""
        if not lines or self._is_broken:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            begins = self._is_beginning
            # Without its beginning a file says nothing: one that is gone is not made again but by the next.
            self._is_lost = not begins and not self._path.exists()
            if self._is_lost:
                return
            with self._path.open("wb" if begins else "ab") as file:
                file.write(b"\n".join([*lines, b""]))
            self._is_beginning = False
            for path in _files(self._folder)[_MAX_FILES:]:
                path.unlink(missing_ok=True)
        except OSError as error:
            self._is_broken = True
            logger.warning(
                "decisions are not logged any more: %s cannot be written (%s); mend the disk and start the "
                "server again",
                self._path,
                error.strerror,
            )

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._server}-{self._number:06d}.jsonl"


def logged_decisions(state_dir: Path) -> Iterator[list[RoutingEvent]]:
    """Yield the events of each file, the latest file first. Raises UserError if there is none."""
    folder = state_dir / FOLDER
    files = _files(folder)
    if not files:
        raise UserError(
            f"there are no decisions in {folder}; give the --state-dir of a server that was started with "
            "`loraplex fleet serve`"
        )
    for path in files:
        try:
            yield list(_read(path))
        except FileNotFoundError:
            continue  # it made way for a newer one just now
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _read(path: Path) -> Iterator[RoutingEvent]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # it is just being written
            try:
                yield decode_event(line)
            except msgspec.MsgspecError as error:
                raise UserError(
                    f"line {number} of {path} is no decision of this version of loraplex: {error}"
                ) from error


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder, the latest first."""
    found = []
    for path in folder.glob("*.jsonl") if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another server has removed it just now
            found.append((path.stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(found, reverse=True)]
