"""The requests that a demand makes, drawn anew for each seed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.workload.jsonl import WorkloadRequest

_SPREAD: Final = 0.8
"""Standard deviation over mean of drawn lengths, between those of ShareGPT's prompts and answers."""
_MIN_TOKENS: Final = 4
_MAX_TIMES_MEAN: Final = 4
"""Drawn lengths are cut at this many times their mean."""
_MOST_REQUESTS: Final = 5_000_000
"""Requests of one run above which drawing and simulating them would exhaust a machine's memory."""
_NUM_SAMPLES: Final = 20_000


class LengthsOf(StrEnum):
    """Lengths of the requests that are drawn."""

    MEAN = "mean"
    """All of the mean lengths, as the papers' planner has them."""
    DRAWN = "drawn"
    """Drawn by a gamma distribution, which is nearer to real traffic."""


def draw_requests(
    demand: Demand, adapters: Sequence[AdapterDemand], *, duration_s: float, seed: int, lengths: LengthsOf
) -> list[WorkloadRequest]:
    """Return Poisson arrivals for these adapters, which are numbered in this order. An adapter has the same
    requests whatever other adapters there are, so that plans are compared on the same traffic. Raises
    PlanError if they are too many to simulate."""
    if sum(each.rate_rps for each in adapters) * duration_s > _MOST_REQUESTS:
        busiest = max(adapters, key=lambda each: each.rate_rps)
        raise PlanError(
            f"more than {_MOST_REQUESTS:,} requests within {duration_s:g} simulated seconds cannot be "
            f"simulated; lower the rates, the highest of which is {busiest.rate_rps:g} requests/s (adapter "
            f"{busiest.name!r}), or give fewer --seconds to `plan check`"
        )
    found: list[WorkloadRequest] = []
    for number, adapter in enumerate(adapters):
        rng = np.random.default_rng([seed, zlib.crc32(adapter.name.encode())])
        count = int(rng.poisson(adapter.rate_rps * duration_s))
        # Given their number, the arrivals of a Poisson process are uniformly distributed.
        arrivals_s = rng.random(count) * duration_s
        prompts = _lengths(rng, demand.prompt_tokens, count, lengths)
        outputs = _lengths(rng, demand.output_tokens, count, lengths)
        found += [
            WorkloadRequest(arrival_s=at_s, prompt_tokens=prompt, output_tokens=output, adapter=number)
            for at_s, prompt, output in zip(
                arrivals_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True
            )
        ]
    found.sort(key=lambda each: each.arrival_s)
    return found


def longest_request(demand: Demand) -> tuple[int, int]:
    """Return the most tokens that a prompt and an answer may have."""
    return round(_MAX_TIMES_MEAN * demand.prompt_tokens), round(_MAX_TIMES_MEAN * demand.output_tokens)


def length_moments(mean: float) -> tuple[float, float]:
    """Return the mean of drawn lengths, which cutting lowers a little, and of their squares."""
    drawn = _lengths(np.random.default_rng(0), mean, _NUM_SAMPLES, LengthsOf.DRAWN).astype(np.float64)
    return float(drawn.mean()), float((drawn**2).mean())


def _lengths(rng: np.random.Generator, mean: float, count: int, lengths: LengthsOf) -> npt.NDArray[np.int64]:
    if lengths is LengthsOf.MEAN:
        return np.full(count, max(round(mean), 1), np.int64)
    shape = 1 / _SPREAD**2
    drawn = np.clip(rng.gamma(shape, mean / shape, count), min(_MIN_TOKENS, mean), _MAX_TIMES_MEAN * mean)
    return np.maximum(np.round(drawn), 1).astype(np.int64)
