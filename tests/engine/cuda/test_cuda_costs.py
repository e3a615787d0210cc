"""The costs of a CUDA engine are read once, and decide how many CPU workers it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda_engines import interpreted

from loraplex.core.cold_start import ColdStart
from loraplex.core.shape import ModelShape
from loraplex.engine.cuda import costs
from loraplex.engine.cuda.costs import cuda_costs
from loraplex.engine.cuda.options import CudaOptions
from loraplex.model.shapes import config_of_shape
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile

SHAPE: ModelShape = config_of_shape("llama-2-7b").shape


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give engines the shipped profile of an H200, and record each read of it."""
    model, found = find_profile(Path("h200-llama-2-7b")), list[str]()
    assert isinstance(model, CostModel)

    def known(shape: ModelShape, device: str, dtype: Any) -> CostModel:
        found.append(device)
        return replace(model, subject=replace(model.subject, num_layers=shape.num_layers))

    monkeypatch.setattr(costs, "known_costs", known)
    return found


@pytest.mark.parametrize(
    ("options", "num_threads", "number"),
    [
        ({"cold_start": ColdStart.CPU_ASSIST}, 16, 6),
        ({"cold_start": ColdStart.CPU_ASSIST}, 8, 3),
        ({"cold_start": ColdStart.CPU_ASSIST}, 2, 0),
        ({"cold_start": ColdStart.CPU_ASSIST, "max_cpu_workers": 2}, 16, 2),
        ({"cold_start": ColdStart.CPU_ASSIST, "cpu_workers": 9, "max_cpu_workers": 2}, 16, 9),
        ({"cold_start": ColdStart.CPU_ASSIST, "padded_to": 64}, 16, 0),
        ({"cold_start": ColdStart.AUTO}, 16, 0),
        ({"cold_start": ColdStart.AUTO, "max_copy_bytes_per_s": 6e9}, 16, 6),
        ({"cold_start": ColdStart.AUTO, "max_copy_bytes_per_s": 6e9, "max_cpu_workers": 0}, 16, 0),
        ({"cold_start": ColdStart.AUTO, "cpu_workers": 3}, 16, 3),
    ],
)
def test_workers_by_options_and_the_threads_that_can_run(
    reads: list[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_threads: int, number: int
) -> None:
    monkeypatch.setattr(costs, "max_threads", lambda: num_threads)
    found = cuda_costs(CudaOptions(**options), SHAPE, "cuda")
    assert found.num_workers == number
    assert len(reads) == 1


def test_an_engine_reads_its_costs_once(reads: list[str]) -> None:
    engine = interpreted(cold_start=ColdStart.CPU_ASSIST, cpu_workers=0)
    try:
        assert (engine.cold_start, engine.num_workers) == (ColdStart.CPU_ASSIST, 0)
        assert len(reads) == 1
    finally:
        engine.close()
