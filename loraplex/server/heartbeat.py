"""Heartbeats of the engine process, and the meaning of their absence.

A process that is stopped, or in which no thread is scheduled, does not exit: only its silence shows it. A
long step is not silent: heartbeats come from another thread than the one that steps.
"""

from __future__ import annotations

import threading
from enum import Enum, auto
from types import TracebackType
from typing import Final, Self

import zmq

from loraplex.server.protocol_ipc import Alive, encode

BEAT_S: Final = 0.25
"""Seconds between heartbeats of the engine process, and between checks by its parent."""


class Heartbeat:
    """Sends heartbeats from the engine process, in a thread with its own socket, until the context ends."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """`socket`: a socket for events that is used for nothing else; it is closed at the end."""
        self._socket = socket
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close(linger=0)

    def _beat(self) -> None:
        sign = encode(Alive())
        while not self._ended.wait(BEAT_S):
            self._socket.send(sign)


class Signs(Enum):
    """The state of a process judged by its heartbeats."""

    ALIVE = auto()
    SILENT = auto()
    """It may come back, but its requests must not wait for it."""
    LOST = auto()
    """It is given up."""


class Silence:
    """The parent's measure of how long the process has been silent, counting only time that the parent itself
    was running."""

    def __init__(self, *, silent_s: float, lost_s: float) -> None:
        self._silent_s = silent_s
        self._lost_s = lost_s
        self._num_heard = 0
        self.seconds = 0.0

    def look(self, num_heard: int) -> Signs:
        """Return the state of the process. Must be called every `BEAT_S` with the number of events received
        so far. Each call counts for at most `BEAT_S`, because a parent that was delayed itself has not
        listened."""
        is_silent = num_heard == self._num_heard
        self._num_heard = num_heard
        self.seconds = self.seconds + BEAT_S if is_silent else 0.0
        if self.seconds >= self._lost_s:
            return Signs.LOST
        return Signs.SILENT if self.seconds >= self._silent_s else Signs.ALIVE
