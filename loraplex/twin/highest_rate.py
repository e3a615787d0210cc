"""Finds by bisection the highest rate at which a condition holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

_MOST_RATES: Final = 12
TOLERANCE: Final = 0.02


def highest_rate(
    holds: Callable[[float], bool], first: float, tolerance: float = TOLERANCE, factor: float = 2.0
) -> float | None:
    """Return the highest rate at which `holds` is true, to within `tolerance` of it.

    `first`: rate to begin with. `factor`: ratio of the rates tried until one holds and one does not. `holds`
    is assumed to be true below the result and false above it. Returns None if it holds at no rate tried, and
    infinity if it holds at every one.
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
