"""What a surrogate knows of a GPU: a few numbers about its adapters, and its slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.planner.demand import AdapterDemand

Features = npt.NDArray[np.float32]
"""One number per feature, in the precision in which surrogates are trained and compare."""


class EngineKind(StrEnum):
    """Kinds of engine, which differ in their features."""

    SLOTS = "slots"
    OWN = "own"


_OF_ADAPTERS: Final = ("served_adapters", "sum_rate", "std_rate", "max_size", "mean_size", "std_size")
FEATURE_NAMES: Final = {
    EngineKind.SLOTS: (*_OF_ADAPTERS, "adapter_slots"),
    EngineKind.OWN: (*_OF_ADAPTERS, "sum_bytes"),
}
"""The features of each kind, in their order."""
FEATURE_UNITS: Final = {
    "served_adapters": "adapters",
    "sum_rate": "requests per second",
    "std_rate": "requests per second, population standard deviation",
    "max_size": "rank",
    "mean_size": "rank",
    "std_size": "rank, population standard deviation",
    "adapter_slots": "adapters on the device at a time",
    "sum_bytes": "bytes of all adapters",
}
SUM_RATE: Final = _OF_ADAPTERS.index("sum_rate")


def slot_features(adapters: Sequence[AdapterDemand], num_slots: int) -> Features:
    """Return the features of an engine with slots that serves these adapters."""
    return features_of([each.rate_rps for each in adapters], [each.rank for each in adapters], num_slots)


def own_features(adapters: Sequence[AdapterDemand], bytes_of_rank: Callable[[int], int]) -> Features:
    """Return the features of an engine without slots. `bytes_of_rank`: size of an adapter of this rank."""
    ranks = [each.rank for each in adapters]
    of_rank = {rank: bytes_of_rank(rank) for rank in set(ranks)}
    return features_of([each.rate_rps for each in adapters], ranks, sum(of_rank[rank] for rank in ranks))


def features_of(rates_rps: Sequence[float], ranks: Sequence[int], last: float) -> Features:
    """Return the features of adapters by rate and rank. `last`: the slots, or the bytes."""
    assert len(rates_rps) == len(ranks) > 0, "no adapters, no features"
    sum_rate, std_rate = _sum_and_std(rates_rps)
    sum_size, std_size = _sum_and_std(ranks)
    count = len(ranks)
    found = (count, sum_rate, std_rate, max(ranks), sum_size / count, std_size, last)
    return np.array(found, np.float32)


def _sum_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the sum and the population standard deviation. Plain Python: numpy takes longer for the few
    adapters of a GPU."""
    total = sum(values)
    mean = total / len(values)
    return total, (sum([(each - mean) ** 2 for each in values]) / len(values)) ** 0.5
