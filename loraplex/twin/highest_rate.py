"""The highest rate at which something holds, found by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

_MOST_RATES: Final = 12
TOLERANCE: Final = 0.02


def highest_rate(
    holds: Callable[[float], bool], first: float, tolerance: float = TOLERANCE, factor: float = 2.0
) -> float | None:
    """Return the highest rate at which `holds` is true, but for `tolerance` of it.

    `first`: where to begin; `factor`: between rates until one holds and one does not. `holds` is taken to be
    true below that rate and false above it. None if it holds at no rate, however low; infinite if it holds at
    every rate that is tried.
    """
    low, high = (first, math.inf) if holds(first) else (0.0, first)
    for _ in range(_MOST_RATES):
        if high == math.inf:
            rate = low * factor
        elif low == 0.0:
            rate = high / factor
        else:
            break
        low, high = (rate, high) if holds(rate) else (low, rate)
    if low == 0.0:
        return None
    if high == math.inf:
        return math.inf
    while high / low > 1 + tolerance:
        rate = math.sqrt(low * high)
        low, high = (rate, high) if holds(rate) else (low, rate)
    return low
