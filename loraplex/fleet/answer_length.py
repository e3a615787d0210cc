"""How long answers are, from those that have ended."""

from __future__ import annotations

from typing import Final

FIRST_GUESS: Final = 155.0
"""Tokens, before any answer has ended."""
_WEIGHT: Final = 0.01
"""Weight of the latest answer: the mean follows about the last hundred."""


class AnswerLength:
    """A moving mean of answer lengths; the plain mean while there are few of them."""

    def __init__(self, first_guess: float = FIRST_GUESS) -> None:
        self.mean_tokens = first_guess
        self._num_seen = 0

    def observe(self, output_tokens: int) -> None:
        """Count an answer; one that ended without a token counts as one, so that the mean divides."""
        self._num_seen += 1
        weight = max(_WEIGHT, 1.0 / self._num_seen)
        self.mean_tokens += weight * (max(output_tokens, 1) - self.mean_tokens)
