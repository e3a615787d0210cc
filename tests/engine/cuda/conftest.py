from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from cuda_engines import RunAgain, record_with
from interpreting import patch_interpreter

from loraplex.engine.cuda import step_lora, step_sizes
from loraplex.kernels.triton.lora_rows import RowsLaunch

patch_interpreter()


@dataclass(frozen=True, kw_only=True, slots=True)
class FewPrograms(RowsLaunch):
    """A GPU runs 96 programs for each row beside each other; the interpreter runs one after the other."""

    rank_programs: int = 4


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Engines launch few programs. What they compute on any number of them is tested in tests/kernels."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(step_lora, "RowsLaunch", FewPrograms)
        yield


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RunAgain:
    """Engines record graphs of few sizes: the interpreter takes its time for every program, padding too."""
    for name, sizes in {
        "DECODE_ROWS": (1, 2, 4, 8),
        "COARSE_DECODE_ROWS": (2, 8),
        "FEWEST_DECODE_ROWS": (8,),
        "MIXED_ROWS": (16, 32),
        "FEWEST_MIXED_ROWS": (32,),
        "MIXED_DECODES": (2, 8),
        "MIXED_SPANS": (2, 8),
    }.items():
        monkeypatch.setattr(step_sizes, name, sizes)
    recorder = RunAgain()
    record_with(recorder, monkeypatch)
    return recorder
