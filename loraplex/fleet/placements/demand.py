"""Predict the demand of the next period from each adapter's tokens/s in the last periods."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.core.errors import UserError

Demand = Callable[[FloatArray], FloatArray]
"""Returns the tokens/s of each adapter in the next period from those of the last periods, oldest first, as
[periods, adapters]."""


def extrapolated_demand(rates: FloatArray) -> FloatArray:
    """Return the tokens/s of each adapter in the next period: its linear trend continued, at least zero.

    `rates`: tokens/s of the last periods, oldest first, as [periods, adapters]. The trend is the
    least-squares line; a single period is continued as it is."""
    if rates.ndim != 2 or not len(rates):
        raise UserError("demand needs the token rates of at least one period, by period and adapter")
    weights = _trend_weights(len(rates))
    return np.maximum(weights @ rates, 0.0)


def mean_demand(rates: FloatArray) -> FloatArray:
    """Return the mean tokens/s of each adapter over the last periods."""
    mean: FloatArray = rates.mean(axis=0)
    return mean


def _trend_weights(num_periods: int) -> FloatArray:
    """Return the weight of each period in the line's value one period after the last.

    The line is linear in the rates, so one product with these weights serves all adapters."""
    if num_periods == 1:
        return np.ones(1)
    offsets = np.arange(num_periods) - (num_periods - 1) / 2
    next_offset = offsets[-1] + 1
    weights: FloatArray = 1 / num_periods + offsets * next_offset / (offsets @ offsets)
    return weights
