"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from loraplex.engine.text_engine import LogprobText
from loraplex.server.generation_responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

# JSON has no infinity; other servers use this number instead.
_IMPOSSIBLE: Final = -9999.0


def chat_logprobs(entries: Iterable[LogprobText]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=_lossy(entry.piece),
                logprob=_finite(entry.logprob or 0.0),
                bytes=list(entry.piece),
                top_logprobs=[
                    TopLogprob(token=_lossy(top.piece), logprob=_finite(top.logprob), bytes=list(top.piece))
                    for top in entry.top
                ],
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    entries: Sequence[LogprobText], offsets: Sequence[int], *, by_token_id: bool = False
) -> CompletionLogprobs:
    """Return parallel lists; `offsets` are the tokens' offsets in the text of the answer."""
    top = _top_by_token_id if by_token_id else _top_by_text
    return CompletionLogprobs(
        tokens=[_token_id_name(e.token_id) if by_token_id else _unambiguous(e.piece) for e in entries],
        token_logprobs=[None if e.logprob is None else _finite(e.logprob) for e in entries],
        top_logprobs=[None if e.logprob is None else top(e, e.logprob) for e in entries],
        text_offset=list(offsets),
    )


def prompt_logprobs(entries: Iterable[LogprobText], num_top: int) -> PromptLogprobs:
    """Return vLLM's format: for each token, its own log-probability and the likeliest tokens', by id."""
    return [None if entry.logprob is None else _by_rank(entry, entry.logprob, num_top) for entry in entries]


def _by_rank(entry: LogprobText, logprob: float, num_top: int) -> dict[str, PromptLogprob]:
    own = str(entry.token_id)
    decoded = _lossy(entry.piece)
    found = {own: PromptLogprob(logprob=_finite(logprob), rank=None, decoded_token=decoded)}
    for rank, top in enumerate(entry.top[:num_top], start=1):
        found[str(top.token_id)] = PromptLogprob(
            logprob=_finite(top.logprob), rank=rank, decoded_token=_lossy(top.piece)
        )
    return found


def _top_by_token_id(entry: LogprobText, logprob: float) -> dict[str, float]:
    """Return the likeliest tokens by id, best first, and the answer's token, even if it is not among them."""
    by_id = {_token_id_name(top.token_id): _finite(top.logprob) for top in entry.top}
    by_id.setdefault(_token_id_name(entry.token_id), _finite(logprob))
    return by_id


def _token_id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _top_by_text(entry: LogprobText, logprob: float) -> dict[str, float]:
    """Return the likeliest tokens by text, and the answer's token, even if it is not among them.

    The answer's token is keyed by its text. Any other token of the same text is keyed by its bytes; of
    several such tokens only the likeliest is included.
    """
    own_text = _unambiguous(entry.piece)
    by_text: dict[str, float] = {}
    for top in entry.top:
        text = _unambiguous(top.piece)
        if top.token_id != entry.token_id and (text == own_text or text in by_text):
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in top.piece)
        by_text.setdefault(text, _finite(top.logprob))
    by_text.setdefault(own_text, _finite(logprob))
    return by_text


def _lossy(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _unambiguous(piece: bytes) -> str:
    """Return the text of a token, with partial characters as bytes: the text is a key, so two must not look
    the same."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + piece.decode("ascii", "backslashreplace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
