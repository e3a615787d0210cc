"""How long CPU workers take for the LoRA of one layer while the device computes its linears.

A product reads its weights once and multiplies every token with each of them. Tokens are shared out among the
cores, but part of the work is not faster with more of them (Amdahl's law): what reads the same weights, and
what waits for the last core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loraplex.perf.least_squares import FitQuality, fit_non_negative, quality_of


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistSample:
    """One product x A B that was timed: `num_tokens` rows through one linear's A and B."""

    num_tokens: int
    rank: int
    in_features: int
    out_features: int
    num_cores: int
    seconds: float

    @property
    def num_weights(self) -> int:
        return self.rank * (self.in_features + self.out_features)


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistCost:
    """`round_trip_s`: from the device's signal that inputs are there to its seeing that outputs are.

    `call_s`: of a product of whatever size. `weight_s`: of each weight, whatever the tokens. `serial_s` and
    `shared_s`: of each weight and token, the latter divided by the cores. `quality`: None if nobody measured.
    """

    round_trip_s: float
    call_s: float
    weight_s: float
    serial_s: float
    shared_s: float
    quality: FitQuality | None = None

    def product_s(self, *, num_tokens: int, num_weights: int, num_cores: int) -> float:
        """`num_weights`: of A and B, rank * (in + out), summed over linears that share an input."""
        return self.call_s + num_weights * (
            self.weight_s + num_tokens * (self.serial_s + self.shared_s / num_cores)
        )

    def layer_s(self, *, num_tokens: int, weights_of_groups: Sequence[int], num_cores: int) -> float:
        """Of one layer's LoRA; a round trip for every group of linears that share an input. Groups without
        LoRA, of zero weights, take nothing."""
        return sum(
            self.round_trip_s
            + self.product_s(num_tokens=num_tokens, num_weights=num_weights, num_cores=num_cores)
            for num_weights in weights_of_groups
            if num_weights > 0
        )


def fit_assist_cost(samples: Sequence[AssistSample], *, round_trip_s: float) -> AssistCost:
    """With samples of one number of cores alone, more cores are taken to be of no help."""
    several = len({sample.num_cores for sample in samples}) > 1
    table = [_amounts(sample, several) for sample in samples]
    seconds = [sample.seconds for sample in samples]
    call_s, weight_s, serial_s, shared_s = fit_non_negative(table, seconds)
    cost = AssistCost(
        round_trip_s=round_trip_s, call_s=call_s, weight_s=weight_s, serial_s=serial_s, shared_s=shared_s
    )
    predicted = [
        cost.product_s(
            num_tokens=sample.num_tokens, num_weights=sample.num_weights, num_cores=sample.num_cores
        )
        for sample in samples
    ]
    return replace(cost, quality=quality_of(predicted, seconds))


def _amounts(sample: AssistSample, several: bool) -> tuple[float, float, float, float]:
    products = float(sample.num_weights * sample.num_tokens)
    shared = products / sample.num_cores if several else 0.0
    return 1.0, float(sample.num_weights), products, shared
