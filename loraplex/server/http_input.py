"""The bytes that a connection has received but not parsed yet, cut into slices, and its flow control.

The parser calls back for everything in the bytes it is given: thousands of requests in one read, or tens of
thousands of one-byte chunks. A slice ends where a request may end, so that it completes at most one:

    headers, and chunked bodies       at the first blank line, and after SLICE_BYTES at the latest
    bodies with a Content-Length      at their last byte; these are one callback, however long they are
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl

SLICE_BYTES: Final = 4096
_BLANK_LINE: Final = b"\r\n\r\n"


class HttpInput:
    """Unparsed bytes of one connection, taken slice by slice."""

    def __init__(self) -> None:
        self._unparsed = bytearray()
        self._tail = b""  # the last bytes taken, which may hold the start of a blank line

    def __len__(self) -> int:
        return len(self._unparsed)

    def add(self, data: bytes) -> None:
        self._unparsed += data

    def clear(self) -> None:
        self._unparsed.clear()

    def take_body(self, num_bytes: int) -> bytes:
        """Remove and return up to `num_bytes` bytes of a body."""
        self._tail = b""
        return self._take(num_bytes)

    def take_lines(self) -> bytes:
        """Remove and return a slice of headers or of a chunked body."""
        start = len(self._tail)
        end = (self._tail + self._unparsed[:SLICE_BYTES]).find(_BLANK_LINE)
        taken = self._take(SLICE_BYTES if end < 0 else end + len(_BLANK_LINE) - start)
        self._tail = (self._tail + taken)[1 - len(_BLANK_LINE) :]
        return taken

    def _take(self, num_bytes: int) -> bytes:
        with memoryview(self._unparsed) as unparsed, unparsed[:num_bytes] as part:
            taken = bytes(part)
        del self._unparsed[:num_bytes]
        return taken


class InputFlow(FlowControl):
    """uvicorn's flow control for input that may already be in this process: `on_resume` continues with it."""

    def __init__(self, transport: asyncio.Transport, on_resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self._on_resume = on_resume

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._on_resume()
