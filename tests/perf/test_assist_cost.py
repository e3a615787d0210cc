"""Seconds of CPU workers for LoRA."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_models import noisy

from loraplex.perf.assist_cost import UNKNOWN_ERROR, AssistCost, AssistSample, fit_assist_cost
from loraplex.perf.assist_split import split_task
from loraplex.perf.least_squares import FitQuality

REAL = AssistCost(round_trip_s=20e-6, token_s=1e-6, call_s=60e-6, weight_s=2e-11, row_s=10e-12)


def sample(num_tokens: int, rank: int, num_workers: int) -> AssistSample:
    weights = (rank * 8192,) * 3
    return AssistSample(
        num_tokens=num_tokens,
        weights=weights,
        num_workers=num_workers,
        seconds=REAL.task_s(weights, num_tokens=num_tokens, num_workers=num_workers),
    )


def test_a_machine_is_found_again_from_noisy_samples() -> None:
    noise = noisy(0.03)
    exact = [sample(t, r, c) for t in (8, 32, 128, 256) for r in (8, 64) for c in (1, 2, 8)]
    noisy_samples = [
        AssistSample(
            num_tokens=known.num_tokens,
            weights=known.weights,
            num_workers=known.num_workers,
            seconds=noise(known.seconds),
        )
        for known in exact
    ]
    found = fit_assist_cost(noisy_samples * 3, round_trip_s=20e-6, token_s=1e-6)
    for known in exact:
        predicted = found.task_s(known.weights, num_tokens=known.num_tokens, num_workers=known.num_workers)
        assert predicted == pytest.approx(known.seconds, rel=0.06)
    assert found.row_s == pytest.approx(REAL.row_s, rel=0.1)
    assert found.quality is not None
    assert found.quality.r_squared > 0.99


def test_workers_share_the_parts_first_and_the_rows_then() -> None:
    def row_part_s(num_tokens: int, num_workers: int) -> float:
        cost = AssistCost(round_trip_s=0, token_s=0, call_s=0, weight_s=0, row_s=1e-12)
        return cost.task_s([1000, 1000, 1000], num_tokens=num_tokens, num_workers=num_workers)

    one = row_part_s(96, 1)
    assert row_part_s(96, 3) == pytest.approx(one / 3)
    assert row_part_s(96, 6) == pytest.approx(one / 6)
    assert row_part_s(16, 6) == row_part_s(16, 3), "so few rows are not worth two workers"


@pytest.mark.parametrize("rows_each", [16, 64, 128])
def test_the_largest_share_is_the_one_that_the_pool_gives(rows_each: int) -> None:
    cost = AssistCost(round_trip_s=0, token_s=0, call_s=0, weight_s=0, row_s=1e-12, rows_each=rows_each)
    shares = split_task(256, [0, 1, 2], [True] * 12, rows_each)
    most_rows = max(share.end - share.start for share in shares)
    assert cost.task_s([1000] * 3, num_tokens=256, num_workers=12) == pytest.approx(most_rows * 1e-9)


def test_a_fit_predicts_by_the_split_that_it_was_measured_with() -> None:
    samples = [replace(sample(t, r, 8), rows_each=128) for t in (16, 64, 128, 256) for r in (8, 64)]
    found = fit_assist_cost(samples, round_trip_s=0, token_s=0)
    assert found.rows_each == 128


def test_the_error_of_a_fit_is_that_of_its_samples_and_large_if_unknown() -> None:
    quality = FitQuality(num_samples=2, r_squared=0.9, mean_error=0.07, worst_error=0.2)
    assert replace(REAL, quality=quality).error == 0.07
    assert REAL.error == UNKNOWN_ERROR


def test_a_layer_pays_a_round_trip_and_transfers_for_every_group() -> None:
    task = REAL.task_s([1000, 1000, 1000], num_tokens=5, num_workers=2)
    layer = REAL.layer_s(6000, num_groups=2, num_tokens=5, num_workers=2)
    assert layer == pytest.approx(2 * (20e-6 + 5e-6 + task))
