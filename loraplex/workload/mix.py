"""Values such as ranks or rates assigned to many adapters by weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from loraplex.workload.errors import WorkloadError


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Values and their weights, e.g. ranks 8 and 64, three to one."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.values) == len(self.weights), "a weight for each value"
        if not self.values:
            raise WorkloadError("there must be at least one value")
        if len(set(self.values)) != len(self.values):
            raise WorkloadError("a value is given twice; give it a weight instead")
        if not all(0 <= weight < math.inf for weight in self.weights) or sum(self.weights) <= 0:
            raise WorkloadError("weights must be finite, none of them negative and not all of them 0")

    def assign(self, count: int, rng: np.random.Generator) -> list[float]:
        """Assign each value to a number of adapters by its weight, to the nearest whole number, in random
        order.

        Counts are exact, not drawn: with twenty adapters, drawn ranks would often differ much from the mix.
        """
        shuffled = rng.permutation(np.repeat(np.arange(len(self.values)), self._counts(count)))
        return [self.values[place] for place in shuffled.tolist()]

    def _counts(self, count: int) -> list[int]:
        wanted = [count * weight / sum(self.weights) for weight in self.weights]
        counts = [math.floor(each) for each in wanted]
        by_remainder = sorted(range(len(wanted)), key=lambda place: counts[place] - wanted[place])
        for place in by_remainder[: count - sum(counts)]:
            counts[place] += 1
        return counts


def parse_mix(text: str, *, least: float, whole: bool = False) -> Mix:
    """Parse `8,16` or, with weights, `8:3,16:1`. Whole values must be at least, others above `least`."""
    values: list[float] = []
    weights: list[float] = []
    for part in text.split(","):
        value, _, weight = part.partition(":")
        try:
            values.append(int(value) if whole else float(value))
            weights.append(float(weight) if weight.strip() else 1.0)
        except ValueError:
            example = "8,16 or 8:3,16:1" if whole else "0.4,0.8 or 0.4:3,0.8:1"
            raise WorkloadError(f"{part.strip()!r} is not a value; write them like {example}") from None
        if not (values[-1] >= least if whole else least < values[-1] < math.inf):
            raise WorkloadError(f"{value.strip()} must be {'at least' if whole else 'more than'} {least:g}")
    return Mix(values=tuple(values), weights=tuple(weights))
