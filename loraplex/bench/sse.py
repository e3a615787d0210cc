"""What a benchmark needs from a completion stream, and nothing more.

The client shares its cores with the server under test, so a chunk costs a line split and a prefix
comparison; JSON is parsed for the last chunk (usage) and for errors only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

_DATA = b"data:"
_DONE = b"[DONE]"
# Text inside a chunk cannot fake this: a quote in it is escaped, and it never comes this early.
_ERROR_WITHIN_BYTES = 24


@dataclass(kw_only=True)
class StreamTally:
    """Counts the token chunks of one response and remembers when each came.

    Chunks are taken to be tokens. Servers may put several tokens into one chunk when they are
    behind; the true number is the one in the usage chunk, which `close` reads.
    """

    chunk_times_s: list[float] = field(default_factory=list)
    output_tokens: int | None = None
    error: str | None = None
    _rest: bytes = b""
    _last_chunk: bytes = b""
    _done: bool = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes as they came from the socket, cut anywhere."""
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
        """The response has ended: read the usage, and say so if the stream was cut short."""
        if self.error is not None:
            return
        if not self._done:
            self.error = f"the stream ended without [DONE] after {len(self.chunk_times_s)} chunks"
            return
        try:
            chunk = json.loads(self._last_chunk)
            self.output_tokens = int(chunk["usage"]["completion_tokens"])
            if not chunk["choices"]:
                self.chunk_times_s.pop()  # usage came in a chunk of its own, without a token
        except (ValueError, KeyError, TypeError):
            self.error = "the stream had no usage chunk (stream_options.include_usage not supported?)"


def error_text(body: bytes) -> str:
    """The message in an OpenAI-style error body, or the start of the body when it is not one."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace").strip() or "(empty body)"
