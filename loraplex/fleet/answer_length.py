"""The mean length of answers, from those that have ended."""

from __future__ import annotations

from typing import Final

FIRST_GUESS: Final = 155.0
"""Tokens, before any answer has ended."""
_GUESS_ANSWERS: Final = 10
"""The guess counts as so many answers. The first answers to end are the shortest ones, and taken for all of
them they would have a router believe that answers are short."""
_WEIGHT: Final = 0.01
"""Weight of the latest answer: the mean follows about the last hundred."""


class AnswerLength:
    """A moving mean of answer lengths; while there are few of them, the plain mean with the first guess."""

    def __init__(self, first_guess: float = FIRST_GUESS) -> None:
        self.mean_tokens = first_guess
        self._num_counted = _GUESS_ANSWERS

    def observe(self, output_tokens: int) -> None:
        """Count an answer; one that ended without a token counts as one, so that the mean divides."""
        self._num_counted += 1
        weight = max(_WEIGHT, 1.0 / self._num_counted)
        self.mean_tokens += weight * (max(output_tokens, 1) - self.mean_tokens)
