"""Signs of life of the engine process, and what their absence means.

A process that is stopped, or so deep in trouble that none of its threads has a turn, does not end: nothing
but its silence tells. A long step is not silent: another thread than the one that steps gives the signs.
"""

from __future__ import annotations

import threading
from enum import Enum, auto
from types import TracebackType
from typing import Final, Self

import zmq

from loraplex.server.protocol_ipc import Alive, encode

BEAT_S: Final = 0.25
"""How often the engine process gives a sign, and how often its parent looks."""


class Heartbeat:
    """In the engine process: gives signs of life, by a thread with a socket of its own, until it is left."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """`socket`: for events, and for nothing else; it is closed at the end."""
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
    """What is to be thought of a process by its signs of life."""

    ALIVE = auto()
    SILENT = auto()
    """It may come back, but nobody should wait for it."""
    LOST = auto()
    """It is not waited for any longer."""


class Silence:
    """In the parent: for how long the process has been silent, as far as the parent was awake to hear it."""

    def __init__(self, *, silent_s: float, lost_s: float) -> None:
        self._silent_s = silent_s
        self._lost_s = lost_s
        self._num_heard = 0
        self.seconds = 0.0

    def look(self, num_heard: int) -> Signs:
        """To be called every `BEAT_S` with the number of events heard so far; each call counts for no more
        than that, as a parent that was itself held up has not listened."""
        is_silent = num_heard == self._num_heard
        self._num_heard = num_heard
        self.seconds = self.seconds + BEAT_S if is_silent else 0.0
        if self.seconds >= self._lost_s:
            return Signs.LOST
        return Signs.SILENT if self.seconds >= self._silent_s else Signs.ALIVE
