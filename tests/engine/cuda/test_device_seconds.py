"""Steps are timed by their device's clock where there is one, for correcting costs and for profiles."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from cuda_engines import greedy, interpreted
from driving import run_to_end

from loraplex.engine.cuda.flight import CudaFlight
from loraplex.engine.executor import StepResult
from loraplex.perf.cost_model import CostKind
from loraplex.perf.drift import DriftWatch


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the seconds of steps that the watch over costs is given."""
    found = list[float]()

    def observe(watch: DriftWatch, kind: CostKind, *, predicted_s: float, measured_s: float) -> bool:
        if kind is CostKind.STEP:
            found.append(measured_s)
        return False

    monkeypatch.setattr(DriftWatch, "observe", observe)
    return found


def land_with(monkeypatch: pytest.MonkeyPatch, device_s: float | None) -> None:
    """Let all steps report these seconds on their device."""
    land = CudaFlight.land

    def on_device(flight: CudaFlight) -> StepResult:
        return replace(land(flight), device_s=device_s)

    monkeypatch.setattr(CudaFlight, "land", on_device)


@pytest.mark.parametrize("device_s", [pytest.param(0.25, marks=pytest.mark.slow), 0.0])
def test_costs_are_corrected_by_the_time_on_the_device(
    observed: list[float], monkeypatch: pytest.MonkeyPatch, device_s: float
) -> None:
    land_with(monkeypatch, device_s)
    engine = interpreted()
    engine.add_request(greedy("a", tokens=20))
    run_to_end(engine)
    assert engine.landed_step_s(9.0) == device_s
    engine.close()
    assert observed == [device_s] * len(observed) != []


def test_without_a_device_by_the_time_on_the_host(
    observed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    land_with(monkeypatch, None)
    engine = interpreted()
    engine.add_request(greedy("a", tokens=20))
    begun_s = time.perf_counter()
    run_to_end(engine)
    took_s = time.perf_counter() - begun_s
    assert engine.landed_step_s(9.0) == 9.0
    engine.close()
    assert observed
    assert all(0 < seconds < took_s for seconds in observed)
