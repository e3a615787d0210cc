"""Pauses never add up to more than the bound allows a request that arrived at any time since."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.batching import PAUSE_SHARE, DelayBound
from loraplex.scheduling.batching.pause_budget import PauseBudget

STEPS = st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.001, 0.2)), max_size=80)
"""Seconds until the next step, and how long requests would pause for it."""


def allowed_s(bound: DelayBound, so_far_s: float) -> float:
    return PAUSE_SHARE * bound.allowed_s(so_far_s)


@given(STEPS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_it_allows_what_no_earlier_arrival_forbids(
    steps: list[tuple[float, float]], share: float, seconds: float
) -> None:
    bound = DelayBound(share=share, seconds=seconds)
    budget, now_s = PauseBudget(bound), 0.0
    pauses: list[tuple[float, float]] = []
    for wait_s, pause_s in steps:
        now_s += wait_s
        slack_s = min(
            allowed_s(bound, now_s - since_s)
            - pause_s
            - sum(seconds for began_s, seconds in pauses if began_s >= since_s)
            for since_s in (now_s, *(began_s for began_s, _ in pauses))
        )
        allows = budget.allows(pause_s, now_s)
        if not math.isclose(slack_s, 0.0, abs_tol=1e-9):
            assert allows == (slack_s > 0)
        if allows:
            budget.spend(pause_s, now_s)
            pauses.append((now_s, pause_s))


def test_pauses_are_forgotten_when_nobody_waits() -> None:
    budget = PauseBudget(DelayBound(share=0.25, seconds=0.25))
    budget.spend(0.25 * PAUSE_SHARE, 1.0)
    assert not budget.allows(0.01, 1.0)
    budget.clear()
    assert budget.allows(0.01, 1.0)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_without_seconds_nobody_pauses_while_others_wait(share: float) -> None:
    assert not PauseBudget(DelayBound(share=share, seconds=0.0)).allows(0.001, 100.0)
