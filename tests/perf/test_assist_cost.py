"""Seconds of CPU workers for LoRA products."""

from __future__ import annotations

import pytest
from cost_models import noisy

from loraplex.perf.assist_cost import AssistCost, AssistSample, fit_assist_cost

REAL = AssistCost(round_trip_s=20e-6, call_s=60e-6, weight_s=2e-11, serial_s=1.5e-12, shared_s=10e-12)


def sample(num_tokens: int, rank: int, num_cores: int, seconds: float | None = None) -> AssistSample:
    num_weights = rank * 8192
    known = REAL.product_s(num_tokens=num_tokens, num_weights=num_weights, num_cores=num_cores)
    return AssistSample(
        num_tokens=num_tokens,
        rank=rank,
        in_features=4096,
        out_features=4096,
        num_cores=num_cores,
        seconds=seconds or known,
    )


def test_a_machine_is_found_again_from_noisy_samples() -> None:
    noise = noisy(0.03)
    grid = [(t, r, c) for t in (8, 32, 128, 256) for r in (8, 64) for c in (1, 2, 8)]
    exact = [sample(*size) for size in grid]
    found = fit_assist_cost(
        [sample(*size, seconds=noise(known.seconds)) for size, known in zip(grid, exact, strict=True)] * 3,
        round_trip_s=20e-6,
    )
    for known in exact:
        predicted = found.product_s(
            num_tokens=known.num_tokens, num_weights=known.num_weights, num_cores=known.num_cores
        )
        assert predicted == pytest.approx(known.seconds, rel=0.06)
    assert found.shared_s == pytest.approx(REAL.shared_s, rel=0.1)
    assert found.quality is not None
    assert found.quality.r_squared > 0.99


def test_three_measured_products_are_repeated() -> None:
    """One core: 256 tokens of rank 64 in 1.66 ms, 32 tokens in 0.29 ms; eight cores: 0.38 ms."""
    samples = [sample(256, 64, 1, 1.66e-3), sample(32, 64, 1, 0.29e-3), sample(256, 64, 8, 0.38e-3)]
    cost = fit_assist_cost(samples, round_trip_s=0.0)
    assert cost.quality is not None
    assert cost.quality.worst_error < 0.02
    four = cost.product_s(num_tokens=256, num_weights=64 * 8192, num_cores=4)
    assert 0.38e-3 < four < 1.66e-3


def test_without_samples_of_several_cores_more_of_them_do_not_help() -> None:
    cost = fit_assist_cost([sample(t, r, 1) for t in (8, 256) for r in (8, 64)], round_trip_s=0.0)
    one = cost.product_s(num_tokens=99, num_weights=1000, num_cores=1)
    assert cost.product_s(num_tokens=99, num_weights=1000, num_cores=16) == one > 0


def test_a_layer_pays_a_round_trip_for_every_group_that_has_lora() -> None:
    product = REAL.product_s(num_tokens=5, num_weights=1000, num_cores=2)
    layer = REAL.layer_s(num_tokens=5, weights_of_groups=[1000, 0, 1000], num_cores=2)
    assert layer == pytest.approx(2 * (20e-6 + product))
    assert REAL.layer_s(num_tokens=5, weights_of_groups=[0], num_cores=2) == 0
