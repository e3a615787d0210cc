"""Decide whether a request is admitted, by the predicted time to its first token or for each later one
(`first_token`).

Recent prediction errors correct the next predictions, so that a machine without a measured profile is judged
by its behaviour.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

_WEIGHT: Final = 0.03
"""Weight of the latest error: the correction follows about the last thirty errors that count."""
_FIRST_ERRORS: Final = 8
"""Number of errors before the correction takes effect; these are not clipped."""
_DEVIATIONS: Final = 1.64
"""Standard deviations of the errors' logarithms above their mean at which the prediction holds for 95 of 100
requests."""
_MAX_RATIO: Final = 4.0
"""Factor around the mean to which a single error is clipped: a request may have waited for an engine to
restart."""
_MIN_SHARE: Final = 0.25
"""Share of the limit below which a time decides nothing, so its error does not count."""


class Bounded(NamedTuple):
    """A tenant that runs more than it is due only as far as others keep their pace (`core.due_places`), in
    the whole fleet. `tenant`: its name. `num_before`: its requests that run, and those that wait before the
    one asked about. `due`: how many it is due to run. `bound`, `paces_s`: see `longest_step_s`."""

    tenant: str
    num_before: int
    due: float
    bound: float | None
    paces_s: tuple[float, ...] = ()


class Admitted(NamedTuple):
    """All admitted requests that have no first token yet, wherever they are. `part_before`: the part of them
    that is served before the request that is asked about. `bounded`: None unless its tenant is bounded."""

    num_requests: int = 0
    prompt_tokens: int = 0
    part_before: float = 1.0
    bounded: Bounded | None = None


class Forecast(NamedTuple):
    """Predicted seconds to the first token of a request. `alone_s`: the same if the replica had nothing else
    to do. `is_idle`: it has nothing else to do. `tpt_s`: predicted seconds for each later token."""

    ttft_s: float
    alone_s: float
    is_idle: bool
    tpt_s: float = 0.0


class Admission:
    """Enforces limits on the time to the first token, or on that for each later one. `max_ttft_s`: that of
    all requests; None for none.

    A request for an idle replica is always admitted: sending it later would gain nothing.
    """

    def __init__(self, max_ttft_s: float | None) -> None:
        self.max_ttft_s: Final = max_ttft_s
        self._num_errors = 0
        self._mean = 0.0  # of the logarithms of measured over predicted; below, their variance
        self._variance = 0.0

    @property
    def is_corrected(self) -> bool:
        """Return whether there were enough errors to correct predictions by."""
        return self._num_errors >= _FIRST_ERRORS

    @property
    def correction(self) -> float:
        """The factor by which predictions are multiplied."""
        if not self.is_corrected:
            return 1.0
        return math.exp(self._mean + _DEVIATIONS * math.sqrt(self._variance))

    def retry_after_s(
        self, predicted: Forecast, waited_s: float = 0.0, *, limit_s: float | None = None
    ) -> float | None:
        """Return the seconds after which a request that is refused for its first token is predicted to fit;
        None if it is admitted.
        `waited_s`: seconds since it arrived. `limit_s`: a stricter limit than that of all requests."""
        limit_s = self.max_ttft_s if limit_s is None else limit_s
        assert limit_s is not None, "nothing limits this request"
        factor = self.correction
        ttft_s = waited_s + factor * predicted.ttft_s
        if predicted.is_idle or ttft_s <= limit_s:
            return None
        # The work before it takes one second per second. A request that takes longer by itself fits an idle
        # replica.
        return ttft_s - max(limit_s, factor * predicted.alone_s)

    def is_too_slow(self, predicted: Forecast, limit_s: float) -> bool:
        """Return whether a request is refused for its later tokens. `limit_s`: seconds for each of them."""
        return not predicted.is_idle and self.correction * predicted.tpt_s > limit_s

    def observe(self, predicted_s: float, measured_s: float, limit_s: float | None = None) -> None:
        """Record the time to the first token of a request that was admitted, or the time for each later one.
        `limit_s`: as above."""
        limit_s = self.max_ttft_s if limit_s is None else limit_s
        assert limit_s is not None, "nothing limited this request"
        if max(self.correction * predicted_s, measured_s) < _MIN_SHARE * limit_s:
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
