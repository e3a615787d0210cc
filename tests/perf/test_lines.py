"""Fits of lines: known parameters are found again, and no cost is ever negative."""

from __future__ import annotations

import pytest
from cost_models import MIB, noisy
from hypothesis import given
from hypothesis import strategies as st

from loraplex.perf.least_squares import fit_non_negative, quality_of
from loraplex.perf.line import Line, fit_line

SIZES = [MIB // 16, MIB // 4, MIB, 4 * MIB, 16 * MIB, 100 * MIB]


def test_a_line_is_found_again_from_noisy_samples() -> None:
    noise = noisy(0.05)
    line = fit_line([(size, noise(10e-6 + size / 54e9)) for size in SIZES for _ in range(10)])
    assert line.latency_s == pytest.approx(10e-6, rel=0.1)
    assert line.units_per_s == pytest.approx(54e9, rel=0.05)
    assert line.quality is not None
    assert line.quality.num_samples == 60
    assert line.quality.r_squared > 0.99
    assert 0.03 < line.quality.worst_error < 0.1


def test_small_amounts_count_as_much_as_large_ones() -> None:
    """Absolute errors would let the one sample of seconds decide, and the latency be anything."""
    samples = [(1.0, 1e-5), (2.0, 1e-5), (4.0, 1e-5), (1e9, 1.0), (1e9, 1.5)]
    assert fit_line(samples).latency_s == pytest.approx(1e-5, rel=0.01)


def test_a_fit_that_would_be_negative_is_zero() -> None:
    line = fit_line([(1.0, 1.0), (2.0, 3.0), (3.0, 5.0)])  # crosses zero at a half
    assert line.latency_s == 0
    assert line.unit_s > 0
    falling = fit_line([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)])
    assert falling.unit_s == 0
    assert falling.units_per_s is None


def test_nothing_takes_no_time() -> None:
    assert Line(latency_s=1.0, unit_s=1.0).seconds(0) == 0


@given(
    st.lists(st.tuples(st.tuples(*[st.integers(0, 1000)] * 4), st.floats(1e-6, 1e3)), min_size=1, max_size=6)
)
def test_no_other_non_negative_coefficients_fit_better(
    samples: list[tuple[tuple[int, ...], float]],
) -> None:
    """The conditions of an optimum: bound ones do not want to rise, free ones do not want to move."""
    features, seconds = [list(row) for row, _ in samples], [each for _, each in samples]
    found = fit_non_negative(features, seconds)
    assert all(value >= 0 for value in found)

    def error(coefficients: list[float]) -> float:
        predicted = [sum(c * f for c, f in zip(coefficients, row, strict=True)) for row in features]
        return sum((p / s - 1) ** 2 for p, s in zip(predicted, seconds, strict=True))

    for index, value in enumerate(found):
        column = max(row[index] / each for row, each in zip(features, seconds, strict=True))
        if column == 0:
            continue
        for change in (-1e-3 / column, 1e-3 / column):
            moved = [*found[:index], max(value + change, 0.0), *found[index + 1 :]]
            assert error(found) <= error(moved) + 1e-6


def test_quality_tells_a_bad_fit() -> None:
    assert quality_of([1.0, 2.0], [1.0, 2.0]).r_squared == 1
    bad = quality_of([2.0, 1.0], [1.0, 2.0])
    assert bad.r_squared < 0
    assert bad.worst_error == 1
    assert bad.mean_error == 0.75
