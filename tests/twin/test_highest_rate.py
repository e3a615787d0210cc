"""Bisection for the highest rate that holds."""

from __future__ import annotations

import math

import pytest

from loraplex.twin.highest_rate import highest_rate


@pytest.mark.parametrize("limit", [0.01, 0.9, 1.0, 3.0, 700.0])
def test_the_limit_is_found_from_below(limit: float) -> None:
    found = highest_rate(lambda rate: rate <= limit, 1.0, 0.02)
    assert found is not None
    assert limit / 1.02 <= found <= limit


def test_what_holds_at_no_rate_has_none() -> None:
    assert highest_rate(lambda rate: False, 1.0) is None


def test_what_holds_at_every_rate_has_no_limit() -> None:
    assert highest_rate(lambda rate: True, 1.0) == math.inf
