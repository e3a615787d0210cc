"""The thresholds of dynamic batching follow Algorithm 2 of dLoRA."""

from __future__ import annotations

import pytest

from loraplex.scheduling.batching.thresholds import PERIOD_STEPS, AdaptiveThresholds, Tuning

SWITCH_S = 0.1


def run_period(
    thresholds: AdaptiveThresholds, *, is_merged: bool, merged_s: float, num_merged: int = 10
) -> None:
    """Run a period of steps in which a first-come, first-served step has 10 requests and takes a second, and
    the step that ends it."""
    for _ in range(PERIOD_STEPS):
        thresholds.begin_step(is_merged=is_merged, candidate="a", switch_s=SWITCH_S)
        thresholds.record(num_merged=num_merged, merged_s=merged_s, num_fcfs=10, fcfs_s=1.0)
    thresholds.begin_step(is_merged=is_merged, candidate="a", switch_s=SWITCH_S)


@pytest.mark.parametrize(
    ("merged_s", "alpha"),
    [(0.5, 0.8 - 0.05), (2.0, 0.8 * 1.1)],
    ids=["merging would have won", "merging would have lost"],
)
def test_after_unmerged_steps_alpha_is_tuned(merged_s: float, alpha: float) -> None:
    thresholds = AdaptiveThresholds(alpha=0.8, beta=0.5)
    run_period(thresholds, is_merged=False, merged_s=merged_s)
    assert thresholds.alpha == pytest.approx(alpha)
    assert thresholds.beta == 0.5


@pytest.mark.parametrize(
    ("merged_s", "beta"),
    [(0.5, 0.5 / 1.1), (2.0, 0.5 + 0.05)],
    ids=["merging won", "merging lost"],
)
def test_after_merged_steps_beta_is_tuned(merged_s: float, beta: float) -> None:
    thresholds = AdaptiveThresholds(alpha=0.8, beta=0.5)
    run_period(thresholds, is_merged=True, merged_s=merged_s)
    # The first step is a change from unmerged to merged, but no period has begun before it.
    assert thresholds.beta == pytest.approx(beta)
    assert thresholds.alpha == 0.8


def test_the_cost_of_merging_counts_once_a_period() -> None:
    """Both have as many requests a second, but for the merge."""
    thresholds = AdaptiveThresholds(alpha=0.8, beta=0.5)
    run_period(thresholds, is_merged=False, merged_s=1.0 - SWITCH_S / PERIOD_STEPS / 2)
    assert thresholds.alpha == pytest.approx(0.8 * 1.1), "slower with the merge"
    thresholds = AdaptiveThresholds(alpha=0.8, beta=0.5)
    run_period(thresholds, is_merged=False, merged_s=1.0 - SWITCH_S / PERIOD_STEPS * 2)
    assert thresholds.alpha == pytest.approx(0.8 - 0.05), "faster even with the merge"


def test_a_change_of_mode_or_of_the_adapter_ends_a_period() -> None:
    thresholds = AdaptiveThresholds(alpha=0.8, beta=0.5)
    thresholds.begin_step(is_merged=False, candidate="a", switch_s=0.0)
    thresholds.record(num_merged=10, merged_s=0.5, num_fcfs=10, fcfs_s=1.0)
    thresholds.begin_step(is_merged=False, candidate="b", switch_s=0.0)
    assert thresholds.alpha == pytest.approx(0.75)
    thresholds.record(num_merged=10, merged_s=0.5, num_fcfs=10, fcfs_s=1.0)
    thresholds.begin_step(is_merged=True, candidate="b", switch_s=0.0)
    assert thresholds.alpha == pytest.approx(0.70)


def test_beta_begins_at_the_ratio_of_the_predicted_times() -> None:
    thresholds = AdaptiveThresholds()
    thresholds.begin_step(is_merged=False, candidate="a", switch_s=0.0)
    thresholds.record(num_merged=4, merged_s=0.015, num_fcfs=4, fcfs_s=0.027)
    assert thresholds.beta == pytest.approx(15 / 27)


def test_the_artifact_tunes_the_other_threshold_and_counts_changes_of_the_candidate() -> None:
    thresholds = AdaptiveThresholds(Tuning.ARTIFACT, alpha=0.8, beta=0.5)
    run_period(thresholds, is_merged=False, merged_s=0.5)
    assert thresholds.alpha == 0.8
    assert thresholds.beta == pytest.approx(0.5 / 1.1)

    thresholds = AdaptiveThresholds(Tuning.ARTIFACT, alpha=0.8, beta=0.5)
    for step in range(PERIOD_STEPS):
        thresholds.begin_step(is_merged=False, candidate="ab"[step % 2], switch_s=0.7)
        thresholds.record(num_merged=10, merged_s=0.5, num_fcfs=10, fcfs_s=1.0)
    thresholds.begin_step(is_merged=False, candidate="a", switch_s=0.7)
    assert thresholds.beta == pytest.approx(0.5 + 0.05), "so many merges would have cost more than they gain"


def test_thresholds_stay_within_bounds_and_beta_below_alpha() -> None:
    thresholds = AdaptiveThresholds(alpha=0.2, beta=0.1)
    for _ in range(100):
        run_period(thresholds, is_merged=False, merged_s=0.1)
    assert thresholds.alpha > 0
    assert thresholds.beta is not None
    assert thresholds.beta <= thresholds.alpha
    for _ in range(100):
        run_period(thresholds, is_merged=False, merged_s=10.0)
    low = thresholds.alpha
    for _ in range(200):
        run_period(thresholds, is_merged=False, merged_s=0.1)
    assert thresholds.alpha < low, "it comes back"
