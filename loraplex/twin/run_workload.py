"""The requests of a recorded run, as far as they can be known from other runs.

The recorded runs' client drew arrivals and prompts from a fixed seed: all runs with the same adapters and
rates were sent the same requests, whatever the engine's settings. The number and length of these can
therefore be learnt from other runs; where there is none, from the rates and from usual values.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from loraplex.core.errors import UserError
from loraplex.twin.recorded_runs import Measured, RunSetup
from loraplex.twin.slot_state import Floats, Ints, Requests

_MAX_WAITING: Final = 5.0
"""Mean number of waiting requests above which a run may not have served all requests."""
_PROMPT_SPREAD: Final = 0.9
_OUTPUT_SPREAD: Final = 0.75
"""Standard deviation over mean of ShareGPT's lengths. Assumed: the lengths are not in the records."""
_MIN_TOKENS: Final = 4
_MAX_TOKENS: Final = 1500
_FIXED_LENGTHS: Final = "dummy"
"""Prefix of the names of datasets whose requests all have the same length."""


class Lengths(NamedTuple):
    """Mean tokens of a request."""

    prompt: float
    output: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterMix:
    """The rank of each adapter, and its position in the order in which the engine processes a batch."""

    ranks: Floats
    order: Ints


class WorkloadBook:
    """Statistics of recorded runs, from which the requests of another run are drawn. `mean_lengths`: all
    requests of a run have its mean lengths."""

    def __init__(self, runs: Sequence[tuple[RunSetup, Measured]], *, mean_lengths: bool = False) -> None:
        self._mean_lengths = mean_lengths
        self._rps: dict[object, list[float]] = {}
        self._lengths: dict[object, list[Lengths]] = {}
        for setup, found in runs:
            if not found.completed_rps:
                continue
            lengths = Lengths(
                found.input_tok_s / found.completed_rps, found.output_tok_s / found.completed_rps
            )
            self._lengths.setdefault(setup.model, []).append(lengths)
            self._lengths.setdefault((setup.model, setup.duration_s), []).append(lengths)
            if found.num_waiting is None or found.num_waiting > _MAX_WAITING:
                continue
            self._rps.setdefault((setup.rates, setup.duration_s), []).append(found.completed_rps)
            self._lengths.setdefault((setup.model, setup.rates, setup.duration_s), []).append(lengths)

    def lengths(self, setup: RunSetup) -> Lengths:
        """Return the lengths of the same requests if they are known, otherwise the usual ones of this model:
        of runs with the same duration if there are any, otherwise of all."""
        known = (
            self._lengths.get((setup.model, setup.rates, setup.duration_s))
            or self._lengths.get((setup.model, setup.duration_s))
            or self._lengths.get(setup.model)
        )
        if not known:
            raise UserError(
                f"no run of {setup.model} says how many requests it served (completed_requests), "
                "from which to learn how long they are; give one that does"
            )
        prompt, output = (float(mean) for mean in np.mean(known, axis=0))
        return Lengths(prompt, output)

    def num_requests(self, setup: RunSetup) -> int:
        known = self._rps.get((setup.rates, setup.duration_s))
        rps = float(np.mean(known)) if known else setup.offered_rps
        return max(round(rps * setup.duration_s), 1)

    def offered_tok_s(self, setup: RunSetup) -> float:
        """Return the prompt and output tokens per second of all requests sent."""
        return self.num_requests(setup) / setup.duration_s * sum(self.lengths(setup))

    def requests(self, setup: RunSetup) -> tuple[Requests, AdapterMix]:
        """Return requests drawn by their statistics: the same for the same rates, but not the recorded
        ones."""
        key = f"{setup.model} {setup.rates} {setup.duration_s}"
        rng = np.random.default_rng(zlib.crc32(key.encode()))
        rates = np.repeat([rate for rate, _ in setup.rates], [count for _, count in setup.rates])
        rng.shuffle(rates)
        fixed = setup.dataset is not None and setup.dataset.startswith(_FIXED_LENGTHS)
        requests = draw_requests(
            rng,
            rates,
            self.lengths(setup),
            num_requests=self.num_requests(setup),
            duration_s=setup.duration_s,
            mean_lengths=self._mean_lengths or fixed,
        )
        num_adapters = len(rates)
        ranks = rng.choice(np.array(setup.ranks, np.float64), size=num_adapters)
        return requests, AdapterMix(ranks=ranks, order=rng.permutation(num_adapters))


def draw_requests(
    rng: np.random.Generator,
    rates: Floats,
    lengths: Lengths,
    *,
    num_requests: int,
    duration_s: float,
    mean_lengths: bool,
) -> Requests:
    """Return so many requests that arrive as Poisson processes, one for each adapter. `rates`: by adapter.
    `mean_lengths`: all requests have the mean lengths, instead of lengths distributed around them."""
    return Requests(
        # Given their number, the arrivals of a Poisson process are uniformly distributed.
        arrival_s=np.sort(rng.random(num_requests)) * duration_s,
        prompt_tokens=_lengths(rng, lengths.prompt, 0.0 if mean_lengths else _PROMPT_SPREAD, num_requests),
        output_tokens=_lengths(rng, lengths.output, 0.0 if mean_lengths else _OUTPUT_SPREAD, num_requests),
        adapter=rng.choice(len(rates), size=num_requests, p=rates / rates.sum()).astype(np.int64),
    )


def _lengths(rng: np.random.Generator, mean: float, spread: float, count: int) -> Ints:
    """Return whole numbers with this mean."""
    if spread == 0.0:
        return np.full(count, max(round(mean), 1), np.int64)
    shape = 1 / spread**2
    drawn = np.clip(rng.gamma(shape, mean / shape, count), _MIN_TOKENS, _MAX_TOKENS)
    whole: Ints = np.maximum(np.round(drawn * mean / drawn.mean()), 1).astype(np.int64)
    return whole
