"""A model that is off for good is corrected; one that is off for a moment is not."""

from __future__ import annotations

import pytest
from cost_models import h200_model, noisy

from loraplex.perf.cost_model import CostKind
from loraplex.perf.drift import DriftConfig, DriftWatch
from loraplex.perf.step_cost import StepFeatures

STEP = StepFeatures(num_decodes=16, decode_positions=1000)


def watch_steps(watch: DriftWatch, real_s: list[float]) -> list[int]:
    """Which of the steps made it correct the model."""
    return [
        index
        for index, measured_s in enumerate(real_s)
        if watch.observe(CostKind.STEP, predicted_s=watch.model.step_s(STEP), measured_s=measured_s)
    ]


@pytest.mark.parametrize("factor", [0.3, 0.6, 1.6, 2.5, 30.0])
def test_a_lasting_change_is_learnt(factor: float) -> None:
    model, noise = h200_model(), noisy(0.1)
    watch = DriftWatch(model)
    corrected = watch_steps(watch, [noise(factor * model.step_s(STEP)) for _ in range(300)])
    assert corrected
    assert watch.model.step_s(STEP) == pytest.approx(factor * model.step_s(STEP), rel=0.1)
    assert watch.ratio(CostKind.STEP) == pytest.approx(1, rel=0.1)
    assert watch.model.copy_s(1e6) == model.copy_s(1e6)
    assert watch.model.step == model.step, "what was measured is kept beside its correction"


def test_what_was_predicted_and_measured_lately_is_kept() -> None:
    model = h200_model()
    watch = DriftWatch(model)
    assert watch.lately(CostKind.STEP) == (0.0, 0.0)
    watch_steps(watch, [1.1 * model.step_s(STEP)] * 5000 + [0.9 * model.step_s(STEP)] * 5000)
    predicted_s, measured_s = watch.lately(CostKind.STEP)
    assert measured_s / predicted_s == pytest.approx(0.9, rel=0.01), "what was long ago has faded"
    assert predicted_s == pytest.approx(1000 * model.step_s(STEP), rel=0.01)


def test_what_is_within_the_bound_is_left_alone() -> None:
    model, noise = h200_model(), noisy(0.2)
    watch = DriftWatch(model)
    assert watch_steps(watch, [noise(1.1 * model.step_s(STEP)) for _ in range(300)]) == []
    assert watch.model is model


def test_a_few_pauses_correct_nothing() -> None:
    model = h200_model()
    usual = model.step_s(STEP)
    watch = DriftWatch(model)
    assert watch_steps(watch, ([usual] * 30 + [1000 * usual] * 2) * 5) == []


def test_patience_counts_observations_in_a_row() -> None:
    model = h200_model()
    watch = DriftWatch(model, DriftConfig(smoothing=1.0, bound=1.5, patience=3))
    twice, usual = 2 * model.step_s(STEP), model.step_s(STEP)
    assert watch_steps(watch, [twice, twice, usual, twice, twice, twice]) == [5]
    assert watch.model.corrections.step == pytest.approx(2)


def test_nothing_is_learnt_from_nothing() -> None:
    watch = DriftWatch(h200_model(), DriftConfig(patience=1))
    assert not watch.observe(CostKind.COPY, predicted_s=0.0, measured_s=1.0)
    assert not watch.observe(CostKind.COPY, predicted_s=1.0, measured_s=0.0)
    assert watch.ratio(CostKind.COPY) == 1
