"""Estimates step costs from recorded runs without a simulation.

Where every adapter has a slot of its own nothing is loaded, and a gap between two tokens is one decode step
and the prompts computed meanwhile. The number of running requests follows from throughput and gap (Little's
law), the number of adapters among them from their rates. So the mean gaps of such runs are linear in the
coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from loraplex.perf.least_squares import fit_non_negative
from loraplex.perf.slot_profile import SlotCosts
from loraplex.twin.recorded_runs import Measured, RunSetup

_LEAST_RUNS: Final = 15
_LEAST_SHARE: Final = 0.1
"""Smallest share of the usual value for a coefficient: the later search multiplies, and could not leave 0."""
_DECODE: Final = (
    "base_s",
    "request_s",
    "adapter_s",
    "adapter_rank_s",
    "slot_s",
    "slot_rank_s",
    "request_rank_s",
    "request_adapter_s",
    "request_slot_s",
)
_PREFILL: Final = ("base_s", "token_s", "slot_s")


def first_guess(runs: Sequence[tuple[RunSetup, Measured]], usual: SlotCosts) -> SlotCosts:
    """Return the estimated costs. `usual`: costs for what these runs do not determine, or if there are too
    few of them."""
    chosen = [run for run in runs if run[0].num_slots >= run[0].num_adapters and run[1].completed_rps]
    if len(chosen) < _LEAST_RUNS:
        return usual
    found = fit_non_negative([_amounts(*run) for run in chosen], [measured.itl_s for _, measured in chosen])
    decode = dict(zip(_DECODE, found, strict=False))
    prefill = dict(zip(_PREFILL, found[len(_DECODE) :], strict=True))
    return replace(
        usual,
        decode=replace(usual.decode, **_raised(decode, usual.decode)),
        prefill=replace(usual.prefill, **_raised(prefill, usual.prefill)),
    )


def _raised(found: dict[str, float], usual: object) -> dict[str, float]:
    return {name: max(value, _LEAST_SHARE * getattr(usual, name)) for name, value in found.items()}


def _amounts(setup: RunSetup, measured: Measured) -> tuple[float, ...]:
    """Return the amounts of work in a gap between two tokens: a decode step, and the prompts computed before
    the next."""
    assert measured.completed_rps is not None
    running = measured.output_tok_s * measured.itl_s
    rates = np.repeat([rate for rate, _ in setup.rates], [count for _, count in setup.rates])
    adapters = min(float((1 - np.exp(-rates / rates.sum() * running)).sum()), setup.num_slots)
    slots, rank = setup.num_slots, setup.max_rank
    prompts = measured.completed_rps * measured.itl_s
    return (
        1.0,
        running,
        adapters,
        adapters * rank,
        slots,
        slots * rank,
        running * rank,
        running * adapters,
        running * slots,
        prompts,
        measured.input_tok_s * measured.itl_s,
        prompts * slots,
    )
