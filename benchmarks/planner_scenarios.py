"""The digital-twin paper's scenarios: rates and sizes high, low and mixed, from 8 to 1,280 adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.planner_data import Model
from loraplex.planner.demand import AdapterDemand, Demand

RATES_RPS: Final = {
    "high": (2.4, 1.2, 0.6, 0.3, 0.15),
    "mixed": (0.6, 0.3, 0.15, 0.075, 0.0375),
    "low": (0.075, 0.0375, 0.01875, 0.009375, 0.0046875),
}
SIZES: Final = {"high": (32,), "low": (8,), "mixed": (8, 16, 32)}
COUNTS: Final = {"high": (32, 56, 96), "mixed": (48, 192, 320), "low": (160, 640, 1280)}
"""Numbers of adapters by rates: the least are for one GPU, the most near what four GPUs serve, or the paper's
most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    rates: str
    sizes: str
    num_adapters: int

    @property
    def name(self) -> str:
        return f"{self.rates} rates, {self.sizes} sizes, {self.num_adapters:,} adapters"

    def demand(self, model: Model) -> Demand:
        """Return adapters that have the rates and sizes in turn, each rate with each size."""
        rates, sizes = RATES_RPS[self.rates], SIZES[self.sizes]
        return Demand(
            adapters=tuple(
                AdapterDemand(
                    name=f"adapter-{number}",
                    rank=sizes[number % len(sizes)],
                    rate_rps=rates[number % len(rates)],
                )
                for number in range(self.num_adapters)
            ),
            prompt_tokens=model.lengths.prompt,
            output_tokens=model.lengths.output,
        )


def scenarios() -> Iterator[Scenario]:
    for rates, counts in COUNTS.items():
        for sizes in SIZES:
            for count in counts:
                yield Scenario(rates=rates, sizes=sizes, num_adapters=count)
