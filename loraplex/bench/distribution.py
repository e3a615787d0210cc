"""Mean and percentiles of a set of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Mean and percentiles, in the unit of the samples."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution | None:
        """Return None without samples: zero would read as a measurement."""
        if not samples:
            return None
        p50, p95, p99 = (float(value) for value in np.percentile(samples, (50, 95, 99)))
        return cls(mean=float(np.mean(samples)), p50=p50, p95=p95, p99=p99)
