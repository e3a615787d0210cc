"""Error bars of predicted figures: how much seeds differ, and how far the twin is off where that is known."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from statistics import fmean, stdev
from typing import Final, NamedTuple

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile

_OF_SLOTS: Final = {"served_tok_s": "output_tok_s", "ttft_s": "ttft_s", "itl_s": "itl_s"}
"""Name of each figure among a slot profile's validation errors."""


class Bar(NamedTuple):
    """A mean, and its error bar to either side."""

    mean: float
    plus_minus: float


def bar_of(values: Sequence[float], relative_error: float) -> Bar:
    """Return the mean over seeds. The bar is the standard deviation over seeds and the known relative error,
    added as squares, as they are independent."""
    mean = fmean(values)
    spread = stdev(values) if len(values) > 1 else 0.0
    return Bar(mean, hypot(spread, relative_error * mean))


def profile_error(profile: Profile, figure: str) -> float:
    """Return the mean relative error of a figure that the profile publishes; 0 if it does not.

    A profile of an engine with slots has the twin's mean error on recorded runs that it was not fitted to.
    One of our own engine has the error of its steps' times on such steps: of reading prompts for TTFT, and
    under changing load for ITL; throughput has none."""
    if isinstance(profile, CostModel):
        held_out = profile.held_out
        if held_out is None:
            return 0.0
        if figure == "itl_s":
            return (held_out.serving or held_out.decode).mean_error
        return held_out.prefill.mean_error if figure == "ttft_s" else 0.0
    return profile.quality.get(f"{_OF_SLOTS.get(figure)}_held_out_smape", 0.0) / 100
