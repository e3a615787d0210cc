"""Log-probabilities in the two shapes OpenAI has for them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from loraplex.engine.text_engine import LogprobText
from loraplex.server.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

# JSON has no infinity; this is the number other servers put in its place.
_IMPOSSIBLE: Final = -9999.0


def chat_logprobs(entries: Iterable[LogprobText]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=_lossy(entry.piece),
                logprob=_finite(entry.logprob or 0.0),
                bytes=list(entry.piece),
                top_logprobs=[
                    TopLogprob(token=_lossy(piece), logprob=_finite(logprob), bytes=list(piece))
                    for piece, logprob in entry.top
                ],
            )
            for entry in entries
        ]
    )


class CompletionLogprobWriter:
    """Makes the parallel lists of one choice, whose offsets go on from one call to the next."""

    def __init__(self) -> None:
        self._offset = 0

    def write(self, entries: Iterable[LogprobText]) -> CompletionLogprobs:
        """One more piece of the choice's text. Must see every token of it, in order."""
        entries = list(entries)
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            if not entry.special:
                self._offset += len(entry.piece.decode("utf-8", "ignore"))
        return CompletionLogprobs(
            tokens=[_unambiguous(entry.piece) for entry in entries],
            token_logprobs=[None if e.logprob is None else _finite(e.logprob) for e in entries],
            top_logprobs=[
                None if e.logprob is None else {_unambiguous(p): _finite(lp) for p, lp in e.top}
                for e in entries
            ],
            text_offset=offsets,
        )


def _lossy(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _unambiguous(piece: bytes) -> str:
    """Parts of characters by their bytes: here the text is a key, and two parts must not look the same."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + piece.decode("ascii", "backslashreplace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
