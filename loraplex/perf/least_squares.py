"""Least squares with non-negative coefficients, in which samples count by relative error.

Costs never fall when there is more to do, so a negative coefficient is fitted noise. Samples span
microseconds to seconds: by absolute error the largest alone would decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class FitQuality:
    """The quality of predictions, for the samples of a fit or others.

    `r_squared`: the share of the seconds' variance that is explained; may be negative. `mean_error`,
    `worst_error`: mean and maximum of |predicted - measured| / measured.
    """

    num_samples: int
    r_squared: float
    mean_error: float
    worst_error: float


def fit_non_negative(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return a coefficient for each column of `features`; a column of zeros gets zero."""
    assert len(features) == len(seconds) > 0, "a sample for each row, and at least one"
    assert min(seconds) > 0, "a duration that was measured is positive"
    weights_N = 1 / np.asarray(seconds, dtype=np.float64)
    a_NK = np.asarray(features, dtype=np.float64) * weights_N[:, None]
    scale_K = np.linalg.norm(a_NK, axis=0)
    scale_K[scale_K == 0] = 1
    a_NK = a_NK / scale_K
    b_N = np.ones(len(seconds))  # seconds over themselves
    num_columns = a_NK.shape[1]
    x_K, active_K = np.zeros(num_columns), np.zeros(num_columns, dtype=bool)
    # Lawson and Hanson's active sets: free the column that helps most, solve, fix columns that became
    # negative.
    for _ in range(10 * num_columns):
        gain_K = a_NK.T @ (b_N - a_NK @ x_K)
        gain_K[active_K] = 0
        best = int(np.argmax(gain_K))
        if gain_K[best] <= 1e-9:
            break
        active_K[best] = True
        while True:
            solved_K = np.zeros(num_columns)
            solved_K[active_K] = np.linalg.lstsq(a_NK[:, active_K], b_N, rcond=None)[0]
            negative_K = active_K & (solved_K <= 0)
            if not negative_K.any():
                break
            # Move towards the solution until the first coefficient reaches zero. Set that one to zero
            # explicitly: rounding may leave it slightly above, and the loop would not end.
            room_K = np.full(num_columns, np.inf)
            room_K[negative_K] = x_K[negative_K] / np.maximum(x_K - solved_K, 1e-300)[negative_K]
            x_K = x_K + float(room_K.min()) * (solved_K - x_K)
            x_K[np.argmin(room_K)] = 0
            active_K &= x_K > 1e-12
            x_K[~active_K] = 0
        x_K = solved_K
    return [float(value) for value in x_K / scale_K]


def quality_of(predicted_s: Sequence[float], measured_s: Sequence[float]) -> FitQuality:
    """Return the quality of predictions, for the samples they were fitted to or any others."""
    pairs = list(zip(predicted_s, measured_s, strict=True))
    errors = [abs(predicted - measured) / measured for predicted, measured in pairs]
    mean = sum(measured_s) / len(measured_s)
    residual = sum((predicted - measured) ** 2 for predicted, measured in pairs)
    spread = sum((measured - mean) ** 2 for measured in measured_s)
    return FitQuality(
        num_samples=len(pairs),
        r_squared=1 - residual / spread if spread > 0 else float(residual == 0),
        mean_error=sum(errors) / len(errors),
        worst_error=max(errors),
    )
