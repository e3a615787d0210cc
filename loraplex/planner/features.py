"""The few numbers that a surrogate knows of a GPU: about its adapters, and its slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numba
import numpy as np
import numpy.typing as npt

from loraplex.planner.demand import AdapterDemand
from loraplex.planner.queued import columns_of

Floats = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]
"""One number per feature, in the precision in which surrogates are trained and compare."""


PAPER_FEATURES: Final = (
    *("served_adapters", "sum_rate", "std_rate", "max_size", "mean_size", "std_size"),
    "adapter_slots",
)
"""The features of the digital-twin paper, in their order."""
FEATURE_NAMES: Final = (*PAPER_FEATURES, "slots_per_adapter", "slot_ranks", "rate_spread")
"""All features: those of the paper, and what follows from them, which a tree would need many splits for."""
FEATURE_UNITS: Final = {
    "served_adapters": "adapters",
    "sum_rate": "requests per second",
    "std_rate": "requests per second, population standard deviation",
    "max_size": "rank",
    "mean_size": "rank",
    "std_size": "rank, population standard deviation",
    "adapter_slots": "adapters on the device at a time",
    "slots_per_adapter": "slots over adapters",
    "slot_ranks": "slots times the largest rank",
    "rate_spread": "standard deviation over mean of the rates",
}
SUM_RATE: Final = FEATURE_NAMES.index("sum_rate")
STD_RATE: Final = FEATURE_NAMES.index("std_rate")
MAX_SIZE: Final = FEATURE_NAMES.index("max_size")
NUM_PAPER_FEATURES: Final = len(PAPER_FEATURES)
_NUM_FEATURES: Final = len(FEATURE_NAMES)


def slot_features(adapters: Sequence[AdapterDemand], num_slots: int) -> Features:
    """Return the features of an engine with slots that serves these adapters."""
    return features_of(*rates_and_ranks(adapters), num_slots)


def features_of(rates_rps: Floats, ranks: Floats, num_slots: int) -> Features:
    """Return the features of adapters by rate and rank."""
    assert len(rates_rps) == len(ranks) > 0, "no adapters, no features"
    found: Features = _features(rates_rps, ranks, num_slots)
    return found


def with_ratios(paper_features: Floats | Features) -> Features:
    """Return all features of rows with those of the paper, in any precision."""
    found = np.empty((len(paper_features), _NUM_FEATURES), np.float32)
    found[:, :NUM_PAPER_FEATURES] = paper_features
    for row in found:
        _fill_ratios(row)
    return found


def rates_and_ranks(adapters: Sequence[AdapterDemand]) -> tuple[Floats, Floats]:
    """Return the rates, in requests per second, and the ranks of these adapters."""
    rates_rps, ranks = columns_of(adapters)
    return np.frombuffer(rates_rps, np.float64), np.frombuffer(ranks, np.float64)


@numba.njit(cache=True, nogil=True)
def _fill_ratios(features):  # type: ignore[no-untyped-def]
    features[7] = features[6] / features[0]
    features[8] = features[6] * features[3]
    features[9] = features[2] * features[0] / features[1] if features[1] > 0 else 0.0


@numba.njit(cache=True, nogil=True)
def _features(rates_rps, ranks, num_slots):  # type: ignore[no-untyped-def]
    found = np.empty(_NUM_FEATURES, np.float32)
    found[0] = len(ranks)
    found[1] = rates_rps.sum()
    found[2] = rates_rps.std()
    found[3] = ranks.max()
    found[4] = ranks.mean()
    found[5] = ranks.std()
    found[6] = num_slots
    _fill_ratios(found)
    return found
