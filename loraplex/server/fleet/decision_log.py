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

from loraplex.core.clock import Clock, MonotonicClock
from loraplex.core.errors import UserError
from loraplex.server.fleet.routing_events import RoutingEvent, Sent, Ticked, decode_event, encode_event

logger = logging.getLogger(__name__)

FOLDER: Final = "decisions"
_MAX_EVENTS: Final = 200_000
"""In one file: some 20 MB, of about 50,000 requests."""
_MAX_FILES: Final = 8
"""That are kept in all, of this server and of others on the same state folder."""

_RETRY_S: Final = 30.0
"""How long nothing is written after a write that failed."""


class DecisionLog:
    """Events on their way to a file. Recording takes no I/O; what was recorded is taken, and written by any
    thread."""

    def __init__(self, state_dir: Path, max_events: int = _MAX_EVENTS, *, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._folder = state_dir / FOLDER
        self._max_events = max_events
        # Two servers on the folder may have one process id, in containers of their own.
        self._server = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._number = 0
        self._num_events = 0
        self._lines: list[bytes] = []
        self._failed_s: float | None = None  # when a write failed; nothing is kept until the next file begins
        self._is_off = False  # which was said
        self._is_lost = False
        self._is_beginning = True
        self._num_decisions = 0
        self._num_taken = 0  # decisions up to what was taken last
        self._num_written = 0  # decisions up to what was written last
        self._num_dropped = 0  # decisions before this file that are in none

    @property
    def is_full(self) -> bool:
        """Tell whether the routing should begin anew, in the next file: this one is long, was deleted, or
        could not be written some time ago."""
        may_retry = self._failed_s is not None and self._clock.now_s() - self._failed_s >= _RETRY_S
        return self._num_events >= self._max_events or self._is_lost or may_retry

    def record(self, event: RoutingEvent) -> None:
        self._num_decisions += isinstance(event, (Sent, Ticked))
        if self._failed_s is None:
            self._lines.append(encode_event(event))
            self._num_events += 1

    def begin(self, events: Iterable[RoutingEvent]) -> None:
        """Begin the next file with the events that a routing begins with."""
        self.write(self.take())
        self._is_beginning, self._is_lost, self._failed_s = True, False, None
        self._num_dropped = self._num_decisions - self._num_written
        self._number += 1
        self._num_events = 0
        for event in events:
            self.record(event)
        # A fleet that knows more adapters than a file should have events must not begin anew all the time.
        self._num_events = 0

    def take(self) -> list[bytes]:
        """Return what was recorded since the last call; on the thread that records."""
        lines, self._lines = self._lines, []
        self._num_taken = self._num_decisions
        return lines

    def write(self, lines: list[bytes]) -> None:
        """Write what was taken; on any thread, one call at a time. A disk that fails ends the log for a
        while, not the server."""
        if not lines or self._failed_s is not None:
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
            self._wrote()
            for path in _files(self._folder)[_MAX_FILES:]:
                path.unlink(missing_ok=True)
        except OSError as error:
            self._failed_s = self._clock.now_s()
            if self._is_off:
                return
            self._is_off = True
            logger.warning(
                "decisions are not logged for now: %s cannot be written (%s); mend the disk; it is tried "
                "again every %g s",
                *(self._path, error.strerror, _RETRY_S),
            )

    def _wrote(self) -> None:
        self._num_written = self._num_taken
        if self._is_off:
            self._is_off = False
            logger.warning("decisions are logged again; %d of them were lost", self._num_dropped)

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
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                # What follows was decided after something that is not known: it cannot be made once more.
                logger.warning(
                    "line %d of %s is no decision of this version of loraplex; decisions from there on are "
                    "left out: %s",
                    *(number, path, error),
                )
                return


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder, the latest first."""
    found = []
    for path in folder.glob("*.jsonl") if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another server has removed it just now
            found.append((path.stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(found, reverse=True)]
