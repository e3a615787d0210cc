"""Sampling options of a request: one frozen, validated record."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from loraplex.core.errors import InvalidRequestError
from loraplex.core.structured_output import StructuredOutput

MAX_LOGPROBS: Final = 20
MAX_CHOICES: Final = 128
MAX_STOP_STRINGS: Final = 16
MAX_BAD_WORDS: Final = 64
MAX_BAD_WORD_CHARS: Final = 256
MAX_SEED: Final = 2**63 - 1
MIN_TEMPERATURE: Final = 1e-5
"""Below it, logits divided by temperature may overflow float32; sampling is greedy there anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling options, validated on construction; `InvalidRequestError` names the bad field.

    temperature 0 (or below MIN_TEMPERATURE) means greedy. top_k 0 means off. `max_tokens` None means: up to
    the context length. `logprobs` k returns the chosen token's log-probability and those of the k most likely
    tokens. `prompt_logprobs` does the same for every prompt token. `n` is expanded before the engine sees it.
    `structured_output`: what the answer must look like; None for any text. `bad_words`: texts that an answer
    may not have; engines go by `bad_word_ids`, their tokens, which `TextEngine` fills in.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    structured_output: StructuredOutput | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, 1, None)
        _check_whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0; use temperature 0 for greedy", param="top_p")
        _check_whole("top_k", self.top_k, 0, None)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_whole("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        for token_id, bias in _pairs("logit_bias", self.logit_bias):
            _check_whole("logit_bias", token_id, 0, None)
            _check_range("logit_bias", bias, -100.0, 100.0)
        _check_texts("stop", self.stop)
        _check_texts("bad_words", self.bad_words)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings", param="stop")
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop must not hold an empty string", param="stop")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"bad_words takes at most {MAX_BAD_WORDS} texts", param="bad_words")
        if any(not word.strip() for word in self.bad_words):
            raise InvalidRequestError("bad_words must not hold an empty text", param="bad_words")
        if any(len(word) > MAX_BAD_WORD_CHARS for word in self.bad_words):
            raise InvalidRequestError(
                f"a text of bad_words may have at most {MAX_BAD_WORD_CHARS} characters", param="bad_words"
            )
        for token_id in self.stop_token_ids:
            _check_whole("stop_token_ids", token_id, 0, None)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_whole(name, count, 0, MAX_LOGPROBS)
        _check_whole("n", self.n, 1, MAX_CHOICES)
        if self.structured_output is not None:
            for name, is_given in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens > 0)):
                if is_given:
                    raise InvalidRequestError(
                        f"{name} does not go with {self.structured_output.param}, which says where the "
                        "answer ends; leave one of them out",
                        param=name,
                    )

    def changed(self, **changes: object) -> SamplingParams:
        """Return a copy with these fields changed, not validated again: for changes of our own to options
        that are valid, not for what a user asks for."""
        copy = object.__new__(SamplingParams)
        for name in self.__slots__:
            object.__setattr__(copy, name, changes.pop(name) if name in changes else getattr(self, name))
        assert not changes, f"no sampling options: {', '.join(changes)}"
        return copy

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _check_range(name: str, value: Any, low: float, high: float | None) -> None:
    """Raise InvalidRequestError for what is no number, and for NaN, infinities and anything outside
    [low, high]."""
    if not _is_a(Real, value):
        raise InvalidRequestError(f"{name} must be a number, not {value!r:.100}", param=name)
    if not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {value}", param=name)
    if value < low or (high is not None and value > high):
        limits = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise InvalidRequestError(f"{name} must be {limits}, not {value:g}", param=name)


def _check_whole(name: str, value: Any, low: float, high: float | None) -> None:
    """Raise InvalidRequestError for anything but a whole number in [low, high]."""
    if _is_a(Real, value) and math.isfinite(value) and not _is_a(Integral, value):
        raise InvalidRequestError(f"{name} must be a whole number, not {value!r:.100}", param=name)
    _check_range(name, value, low, high)


def _is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_texts(name: str, value: object) -> None:
    """Raise InvalidRequestError for anything but a tuple or list of texts. A text alone is no such list: its
    characters would be taken."""
    if not isinstance(value, (tuple, list)) or not all(isinstance(text, str) for text in value):
        raise InvalidRequestError(f"{name} must be a tuple of texts, not {value!r:.100}", param=name)


def _pairs(name: str, value: object) -> Iterable[tuple[object, object]]:
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in value
    ):
        raise InvalidRequestError(
            f"{name} must be a tuple of pairs of a token id and a number, not {value!r:.100}", param=name
        )
    return value
