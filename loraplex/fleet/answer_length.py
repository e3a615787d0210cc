"""The mean length of answers, from those that have ended."""

from __future__ import annotations

from typing import Final

FIRST_GUESS: Final = 155.0
"""Tokens assumed before any answer has ended."""
_GUESS_ANSWERS: Final = 10
"""Number of answers that the guess counts as. The first answers to end are the shortest, and taken alone they
would make a router believe that all answers are short."""
_WEIGHT: Final = 0.01
"""Weight of the latest answer: the mean follows about the last hundred."""


class AnswerLength:
    """A moving mean of answer lengths; while there are few, the plain mean including the first guess."""

    def __init__(self, first_guess: float = FIRST_GUESS) -> None:
        self.mean_tokens = first_guess
        self._num_counted = _GUESS_ANSWERS

    def observe(self, output_tokens: int) -> None:
        """Count an answer; an empty one counts as one token, so that the mean is never zero."""
        self._num_counted += 1
        weight = max(_WEIGHT, 1.0 / self._num_counted)
        self.mean_tokens += weight * (max(output_tokens, 1) - self.mean_tokens)
