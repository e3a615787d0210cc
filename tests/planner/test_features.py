"""The numbers that a surrogate knows of a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from loraplex.planner.demand import AdapterDemand
from loraplex.planner.features import FEATURE_NAMES, slot_features, with_ratios
from loraplex.planner.grid import scaled_grid, whole_grid

ADAPTERS = [
    AdapterDemand(name="a", rank=8, rate_rps=0.5),
    AdapterDemand(name="b", rank=8, rate_rps=1.5),
    AdapterDemand(name="c", rank=32, rate_rps=1.0),
]
# Deviations from the mean rate 1: -0.5, 0.5, 0; from the mean rank 16: -8, -8, 16.
OF_ADAPTERS = [3, 3.0, (0.5 / 3) ** 0.5, 32, 16.0, 128**0.5]


def test_features_of_an_engine_with_slots() -> None:
    assert FEATURE_NAMES[6:] == ("adapter_slots", "slots_per_adapter", "slot_ranks", "rate_spread")
    assert slot_features(ADAPTERS, 2).tolist() == pytest.approx(
        [*OF_ADAPTERS, 2, 2 / 3, 64, (0.5 / 3) ** 0.5]
    )


def test_ratios_of_rows_are_those_of_their_adapters() -> None:
    features = np.array([slot_features(ADAPTERS[:number], slots) for number in (1, 3) for slots in (1, 3, 7)])
    assert (with_ratios(features[:, :7].astype(np.float64)) == features).all()


def test_the_grid_is_every_choice_of_sizes_and_rates_with_as_many_slots_as_adapters_or_fewer() -> None:
    points = whole_grid()
    assert len(points) == 10 * 220 * 66
    assert all(point.num_slots <= point.num_adapters for point in points)
    assert len(set(points)) == len(points)


def test_shares_of_the_scaled_grid_are_spread_evenly_over_the_logarithm() -> None:
    shares = np.array([point.share for point in scaled_grid()])
    assert len(shares) == 2 * len(whole_grid())
    assert 0.7 <= shares.min() < shares.max() <= 1.6
    assert np.median(shares) == pytest.approx((0.7 * 1.6) ** 0.5, rel=0.01)
