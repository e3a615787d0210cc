from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from interpreting import patch_interpreter

from loraplex.engine.cuda import step_lora
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
