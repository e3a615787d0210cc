"""Random numbers, one stream for each purpose: other lengths leave arrivals as they are."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """The numbers are part of what a seed means; new ones go to the end."""

    RANKS = 0
    RATES = 1
    SOURCES = 2
    ARRIVALS = 3
    ADAPTERS = 4
    LENGTHS = 5
    RATE_CHANGES = 6


def stream(seed: int, purpose: Purpose) -> np.random.Generator:
    """Always from its beginning: whoever goes through a workload twice finds the same."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(purpose),))))
