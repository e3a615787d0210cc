"""Checks of a request before an engine sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from loraplex.core.errors import ContextLengthError, InvalidRequestError
from loraplex.core.sampling import SamplingParams
from loraplex.core.words import plural

# The automaton of a stop string is built in Python on the event loop; this limit keeps it under a
# millisecond.
MAX_STOP_CHARS: Final = 1024


def check_prompt(prompt: Sequence[int], *, vocab_size: int) -> None:
    """Refuse an empty prompt and ids the model has no embedding for."""
    if not prompt:
        raise InvalidRequestError("the prompt is empty: at least one token is needed", param="prompt")
    check_vocabulary(prompt, vocab_size=vocab_size, param="prompt")


def check_vocabulary(token_ids: Sequence[int], *, vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary, with `param` as the field at fault. `token_ids` must not be
    empty."""
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequestError(
            f"token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})", param=param
        )


def check_token_ids(params: SamplingParams, *, vocab_size: int) -> None:
    """Refuse sampling options that name tokens the model does not have, and oversized stop strings."""
    for token_id, _ in params.logit_bias:
        _check_id("logit_bias", token_id, vocab_size)
    for token_id in params.stop_token_ids:
        _check_id("stop_token_ids", token_id, vocab_size)
    if any(len(stop) > MAX_STOP_CHARS for stop in params.stop):
        raise InvalidRequestError(f"a stop string may have at most {MAX_STOP_CHARS} characters", param="stop")


def fit_max_tokens(params: SamplingParams, *, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """Return the options with `max_tokens` set. Raise ContextLengthError for what does not fit the
    context."""
    room = max_model_len - num_prompt_tokens
    tokens = f"{num_prompt_tokens} {plural('token', num_prompt_tokens)}"
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {tokens}, and the context length is {max_model_len} tokens, "
            "of which at least one must be left for the answer; shorten the prompt",
            param="prompt",
        )
    if params.max_tokens is None:
        if params.min_tokens > room:
            raise ContextLengthError(
                f"min_tokens is {params.min_tokens}, but the prompt of {tokens} leaves "
                f"{room} of the context of {max_model_len} tokens",
                param="min_tokens",
            )
        return params.changed(max_tokens=room)
    if params.max_tokens > room:
        raise ContextLengthError(
            f"the prompt has {tokens} and max_tokens is {params.max_tokens}, together "
            f"{num_prompt_tokens + params.max_tokens}, but the context length is {max_model_len} tokens; "
            "shorten the prompt or lower max_tokens",
            param="max_tokens",
        )
    return params


def _check_id(name: str, token_id: int, vocab_size: int) -> None:
    if token_id >= vocab_size:
        raise InvalidRequestError(
            f"{name}: token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})", param=name
        )
