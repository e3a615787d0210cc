"""The requests of an engine process, and the delivery of their outputs to the streams that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from loraplex.core.request import EngineOutput
from loraplex.engine.output_stream import OutputStream

_DELIVERED_PER_TURN: Final = 8
"""Number of outputs delivered to their streams in one iteration of the event loop. One takes about 0.1 ms,
and 0.4 ms if it is the last of an answer."""


class EngineStreams:
    """The output streams of all requests, by request id. For use in one event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, OutputStream] = {}
        self._undelivered: dict[str, list[EngineOutput]] = {}  # by request, in order of arrival

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the requests."""
        return iter(self._streams)

    def open(self, request_id: str) -> OutputStream:
        assert request_id not in self._streams, "request ids are unique"
        stream = self._streams[request_id] = OutputStream()
        return stream

    def close(self, request_id: str) -> None:
        del self._streams[request_id]

    def deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Deliver outputs to their streams, a limited number in each iteration of the event loop.

        A step of hundreds of requests wakes as many tasks; other work runs in between. Further outputs of a
        request that still waits for delivery are delivered together with it.
        """
        is_delivering = bool(self._undelivered)
        for output in outputs:
            self._undelivered.setdefault(output.request_id, []).append(output)
        if not is_delivering:
            self._take_turn()

    def reject(self, request_id: str, error: Exception) -> None:
        """End a request that the engine refuses, if it still exists."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.fail(error)

    def fail(self, error: Callable[[], Exception], request_id: str | None = None) -> None:
        """End all requests, or one: outputs that arrived are delivered, then each request raises its own
        error."""
        self._push(len(self._undelivered))  # a complete answer must not become an error
        for each, stream in self._streams.items():
            if request_id in (None, each):
                stream.fail(error())

    def _take_turn(self) -> None:
        self._push(_DELIVERED_PER_TURN)
        if self._undelivered:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _push(self, num_requests: int) -> None:
        for request_id in list(islice(self._undelivered, num_requests)):
            outputs = self._undelivered.pop(request_id)
            stream = self._streams.get(request_id)
            if stream is not None:  # else it was cancelled meanwhile
                for output in outputs:
                    stream.push(output)
