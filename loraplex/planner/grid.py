"""The workloads and slots that a surrogate is trained on: every combination of three sizes, three rates,
adapters and slots, and twice as many with rates near what a GPU serves.

Most of the combinations are far above what any GPU serves, or far below. Packers ask about where a GPU begins
to starve, so rates are also scaled to what this GPU serves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement
from typing import Final

import numpy as np

from loraplex.twin.slot_state import Floats

SIZES: Final = (8, 16, 32)
RATES_RPS: Final = (3.2, 1.6, 0.8, 0.4, 0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125)
COUNTS: Final = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)
"""Numbers of adapters, and of slots; never more slots than adapters."""

_SHARES: Final = (0.7, 1.6)
"""Least and greatest of the scaled rates, relative to what a GPU serves of them when it is flooded: a little
more than what it serves without a long queue to choose from."""
_GOLDEN: Final = (5**0.5 - 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPoint:
    """One workload and the slots that serve it. Each adapter has one of `sizes` and one of `rates_rps`, which
    are then scaled to this `share` of what the GPU serves when it is flooded, if it is given."""

    sizes: tuple[int, ...]
    rates_rps: tuple[float, ...]
    num_adapters: int
    num_slots: int
    share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A point whose adapters have a rate, before it is scaled, and a rank each."""

    rates_rps: Floats
    ranks: Floats
    num_slots: int

    @property
    def max_rank(self) -> int:
        return int(self.ranks.max())


@cache
def whole_grid() -> tuple[GridPoint, ...]:
    """Return all points: sizes and rates are chosen with repetition."""
    return tuple(
        GridPoint(sizes=sizes, rates_rps=rates, num_adapters=num_adapters, num_slots=num_slots)
        for sizes in combinations_with_replacement(SIZES, 3)
        for rates in combinations_with_replacement(RATES_RPS, 3)
        for num_adapters in COUNTS
        for num_slots in COUNTS
        if num_slots <= num_adapters
    )


def scaled_grid() -> list[GridPoint]:
    """Return the points of the whole grid twice, with a share each, spread evenly over the logarithm."""
    least, most = _SHARES
    return [
        replace(point, share=least * (most / least) ** (place * _GOLDEN % 1))
        for place, point in enumerate((*whole_grid(), *whole_grid()))
    ]


def draw(point: GridPoint, rng: np.random.Generator) -> Drawn:
    """Give every adapter a rate and a rank of the point's, at random."""
    rates = rng.choice(np.array(point.rates_rps), size=point.num_adapters)
    ranks = rng.choice(np.array(point.sizes, np.float64), size=point.num_adapters)
    return Drawn(rates_rps=rates, ranks=ranks, num_slots=point.num_slots)
