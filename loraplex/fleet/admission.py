"""Whether a request is let in: by when its first token is predicted to come (`first_token`).

How far predictions were off lately corrects the next ones, so that a machine that nobody has measured is
judged by what it does.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

_WEIGHT: Final = 0.03
"""Weight of the latest error: the correction follows about the last thirty that count."""
_FIRST_ERRORS: Final = 8
"""With fewer of them nothing is corrected, and none of them is cut."""
_DEVIATIONS: Final = 1.64
"""Of the errors' logarithms: with so many above their mean, the prediction holds for 95 of 100 requests."""
_MAX_RATIO: Final = 4.0
"""A single error counts as no further from the mean than by this factor: a request may have waited for an
engine that was started again."""
_MIN_SHARE: Final = 0.25
"""The share of the bound below which a time decides nothing, and is no error that counts."""


class Admitted(NamedTuple):
    """All requests that were let in and have no first token, wherever they are on their way."""

    num_requests: int = 0
    prompt_tokens: int = 0


class Forecast(NamedTuple):
    """Predicted seconds to the first token of a request. `alone_s`: if the replica had nothing else to do.
    `is_idle`: it has not."""

    ttft_s: float
    alone_s: float
    is_idle: bool


class Admission:
    """Keeps to a bound on the time to the first token.

    A request for a replica with nothing to do is always let in: nothing would be gained by sending it later.
    """

    def __init__(self, max_ttft_s: float) -> None:
        self.max_ttft_s: Final = max_ttft_s
        self._num_errors = 0
        self._mean = 0.0  # of the logarithms of measured to predicted, and their variance
        self._variance = 0.0

    @property
    def correction(self) -> float:
        """Return the factor that predictions are multiplied with."""
        if self._num_errors < _FIRST_ERRORS:
            return 1.0
        return math.exp(self._mean + _DEVIATIONS * math.sqrt(self._variance))

    def retry_after_s(self, predicted: Forecast, waited_s: float = 0.0) -> float | None:
        """Return the seconds after which a request that is refused is predicted to fit; None if it is let in.
        `waited_s`: since it came."""
        factor = self.correction
        ttft_s = waited_s + factor * predicted.ttft_s
        if predicted.is_idle or ttft_s <= self.max_ttft_s:
            return None
        # The work before it is done second by second. One that takes longer by itself fits an idle replica.
        return ttft_s - max(self.max_ttft_s, factor * predicted.alone_s)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Record when the first token came of a request that was let in."""
        if max(self.correction * predicted_s, measured_s) < _MIN_SHARE * self.max_ttft_s:
            return
        if predicted_s <= 0 or measured_s <= 0:
            return
        error = math.log(measured_s / predicted_s)
        if self._num_errors >= _FIRST_ERRORS:
            most = math.log(_MAX_RATIO)
            error = min(max(error, self._mean - most), self._mean + most)
        self._num_errors += 1
        weight = max(_WEIGHT, 1 / self._num_errors)
        difference = error - self._mean
        self._mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference * difference)
