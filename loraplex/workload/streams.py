"""Random numbers, one stream per purpose, so that a change of lengths leaves arrivals unchanged."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """Purpose of a stream. Its number is part of what a seed means; new ones go to the end."""

    RANKS = 0
    RATES = 1
    SOURCES = 2
    ARRIVALS = 3
    ADAPTERS = 4
    LENGTHS = 5
    RATE_CHANGES = 6
    TENANTS = 7


def stream(seed: int, purpose: Purpose) -> np.random.Generator:
    """Return a stream at its beginning, so that every iteration over a workload draws the same."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(purpose),))))
