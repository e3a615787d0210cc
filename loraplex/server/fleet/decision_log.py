"""The decisions of a fleet on disk: the latest ones, with everything they were made from.

A file holds the events of a routing from its beginning, one per line. When it gets long, the routing starts
over in the next file, so that each file can be read by itself; earlier ones are kept up to a limit.
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
"""Most events in one file: some 20 MB, for about 50,000 requests."""
_MAX_FILES: Final = 8
"""Most files that are kept, of this server and of others on the same state folder together."""

_RETRY_S: Final = 30.0
"""Seconds for which nothing is written after a failed write."""


class DecisionLog:
    """Collects events and writes them to files. Recording does no I/O; recorded events are taken, and may be
    written by any thread."""

    def __init__(self, state_dir: Path, max_events: int = _MAX_EVENTS, *, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._folder = state_dir / FOLDER
        self._max_events = max_events
        # Two servers on the folder may have the same process id, in different containers.
        self._server = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._number = 0
        self._num_events = 0
        self._lines: list[bytes] = []
        self._failed_s: float | None = None  # time of a failed write; until the next file nothing is kept
        self._is_off = False  # the failure was logged
        self._is_lost = False
        self._is_beginning = True
        self._num_decisions = 0
        self._num_taken = 0  # decisions up to the last `take`
        self._num_written = 0  # decisions up to the last write
        self._num_dropped = 0  # decisions before this file that are in no file

    @property
    def is_full(self) -> bool:
        """Return whether the routing should start over in the next file: this one is long, was deleted, or a
        write failed some time ago."""
        may_retry = self._failed_s is not None and self._clock.now_s() - self._failed_s >= _RETRY_S
        return self._num_events >= self._max_events or self._is_lost or may_retry

    def record(self, event: RoutingEvent) -> None:
        self._num_decisions += isinstance(event, (Sent, Ticked))
        if self._failed_s is None:
            self._lines.append(encode_event(event))
            self._num_events += 1

    def begin(self, events: Iterable[RoutingEvent]) -> None:
        """Begin the next file with the initial events of a routing."""
        self.write(self.take())
        self._is_beginning, self._is_lost, self._failed_s = True, False, None
        self._num_dropped = self._num_decisions - self._num_written
        self._number += 1
        self._num_events = 0
        for event in events:
            self.record(event)
        # A fleet with more adapters than the limit of events must not start over all the time.
        self._num_events = 0

    def take(self) -> list[bytes]:
        """Return what was recorded since the last call. Must be called on the recording thread."""
        lines, self._lines = self._lines, []
        self._num_taken = self._num_decisions
        return lines

    def write(self, lines: list[bytes]) -> None:
        """Write what was taken; on any thread, one call at a time. A failing disk stops the log for a while,
        not the server."""
        if not lines or self._failed_s is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            begins = self._is_beginning
            # A file is useless without its beginning, so a deleted one is not created again, and the
            # routing starts over in the next file.
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
            continue  # it was just deleted to make room for a newer one
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
                # Later decisions depend on an event that is unknown, so they cannot be replayed.
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
        with suppress(FileNotFoundError):  # another server has just removed it
            found.append((path.stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(found, reverse=True)]
