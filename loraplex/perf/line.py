"""A cost of a latency plus an amount over a rate: copies to a device, reads of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.perf.least_squares import FitQuality, fit_non_negative, quality_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A latency plus a cost per unit. `unit_s`: seconds per additional unit, the inverse of the rate.
    `quality`: None if not measured."""

    latency_s: float
    unit_s: float
    quality: FitQuality | None = None

    @property
    def units_per_s(self) -> float | None:
        """The rate; None if the amount makes no difference."""
        return 1 / self.unit_s if self.unit_s > 0 else None

    def seconds(self, amount: float) -> float:
        """Return the seconds for an amount; zero for zero, without the latency."""
        return self.latency_s + amount * self.unit_s if amount > 0 else 0.0


def fit_line(samples: Sequence[tuple[float, float]]) -> Line:
    """Fit a line to (amount, seconds) samples with at least two different amounts."""
    assert len({amount for amount, _ in samples}) >= 2, "one amount alone does not tell latency from rate"
    seconds = [each for _, each in samples]
    latency_s, unit_s = fit_non_negative([(1.0, amount) for amount, _ in samples], seconds)
    predicted = [latency_s + amount * unit_s for amount, _ in samples]
    return Line(latency_s=latency_s, unit_s=unit_s, quality=quality_of(predicted, seconds))
