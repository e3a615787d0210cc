"""A minimal parser of completion streams for benchmarks.

The client shares its cores with the server under test, so a chunk costs a line split and a prefix
comparison; JSON is parsed for the last chunk (usage) and for errors only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

_DATA = b"data:"
_DONE = b"[DONE]"
# Text inside a chunk cannot fake this: a quote in it is escaped, and text never comes this early.
_ERROR_WITHIN_BYTES = 24


@dataclass(kw_only=True)
class StreamTally:
    """Counts the token chunks of one response and records their times.

    Each chunk is taken as a token. Servers may put several tokens into one chunk when they are
    behind; the true number is in the usage chunk, which `close` reads.
    """

    chunk_times_s: list[float] = field(default_factory=list)
    output_tokens: int | None = None
    error: str | None = None
    _rest: bytes = b""
    _last_chunk: bytes = b""
    _done: bool = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Add bytes from the socket, cut anywhere."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA):
                continue  # blank separators, comments, event names
            payload = line[len(_DATA) :].strip()
            if payload == _DONE:
                self._done = True
            elif b'"error"' in payload[:_ERROR_WITHIN_BYTES]:
                self.error = error_text(payload)
            else:
                self._last_chunk = payload
                self.chunk_times_s.append(now_s)

    def close(self) -> None:
        """End the response: read the usage, and set `error` if the stream was cut short."""
        if self.error is not None:
            return
        if not self._done:
            self.error = f"the stream ended without [DONE] after {len(self.chunk_times_s)} chunks"
            return
        try:
            chunk = json.loads(self._last_chunk)
            self.output_tokens = int(chunk["usage"]["completion_tokens"])
            if not chunk["choices"]:
                self.chunk_times_s.pop()  # usage came in its own chunk, without a token
        except (ValueError, KeyError, TypeError):
            self.error = "the stream had no usage chunk (stream_options.include_usage not supported?)"


def error_text(body: bytes) -> str:
    """Return the message of an OpenAI-style error body, or the start of any other body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace").strip() or "(empty body)"
