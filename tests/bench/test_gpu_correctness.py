"""The checks that a GPU is put to, at sizes for a CPU: they pass where all is well, and fail elsewhere."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")
pytest.importorskip("triton", reason="kernels are written in Triton")

from benchmarks import gpu_correctness, sources
from benchmarks.correctness import batch, kernel_rows, kernels
from benchmarks.correctness.check import Setting, row_error, within
from benchmarks.correctness.comparing import text_error
from benchmarks.correctness.kernel_rows import row_checks

TINY = Setting(device="cuda" if torch.cuda.is_available() else "cpu", tiny=True)
TOLERANCE = kernels.TOLERANCE[TINY.kernel_dtype]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch", "burst", "cold", "endurance", "graphs", "merging", "swapping"])
def test_sections_without_a_checkpoint_pass(name: str) -> None:
    found = gpu_correctness.run_section(name, tiny=True)
    assert found["passed"], [check for check in found["checks"] if not check["passed"]]
    assert found["sizes"] == "tiny"
    assert {"date", "machine", "git_commit", "packages"} <= found.keys()
    assert sources.changed_since(found, "gpu_correctness.json", name) == []
    json.dumps(found, allow_nan=False)


def test_kernels_that_are_right_pass_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(check.passed for check in row_checks("tiny", TINY, TOLERANCE))
    right = kernel_rows.silu_mul
    monkeypatch.setattr(kernel_rows, "silu_mul", lambda gate_up: right(gate_up) * 1.01)
    failed = [check.name for check in row_checks("tiny", TINY, TOLERANCE) if not check.passed]
    assert failed == ["tiny: silu_mul of 1 rows", "tiny: silu_mul of 5 rows"]


def test_a_section_that_breaks_off_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(setting: Setting) -> Any:
        raise ValueError("no such kernel")

    monkeypatch.setattr(batch, "batch", broken)
    found = gpu_correctness.run_section("batch", tiny=True)
    assert not found["passed"]
    assert found["checks"][0]["error"] == "ValueError: no such kernel"


def test_a_failed_check_is_the_exit_status_and_is_written_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"burst": "as before"}))
    verdicts = {"kernels": True, "batch": False}
    monkeypatch.setattr(
        gpu_correctness,
        "in_process",
        lambda name, *, tiny: {"passed": verdicts[name], "checks": [], "seconds": 0},
    )
    assert gpu_correctness.main(["kernels", "--tiny", "--out", str(out)]) == 0
    assert gpu_correctness.main(["kernels", "batch", "--tiny", "--out", str(out)]) == 1
    assert json.loads(out.read_text()).keys() == {"burst", "kernels", "batch"}


def test_an_unknown_section_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_correctness.main(["kernel", "--tiny"])
    assert "no section kernel; there are kernels, families" in capsys.readouterr().err


def test_every_section_exists() -> None:
    for name in gpu_correctness.SECTIONS:
        assert callable(getattr(importlib.import_module(f"benchmarks.correctness.{name}"), name))


def test_nan_passes_no_check() -> None:
    assert not within("n", "c", float("nan"), 1.0).passed
    assert within("n", "c", float("nan"), 1.0).as_json()["worst_error"] == "not finite"
    assert row_error(torch.tensor([[torch.nan, 1.0]]), torch.ones(1, 2)) == float("inf")


@pytest.mark.parametrize(
    ("found", "error"),
    [([1, 2, 3], (0.0, 3)), ([1, 5, 3], (0.25, 1)), ([1, 2], (float("inf"), 0))],
    ids=["equal", "another token", "another length"],
)
def test_texts_are_judged_by_their_first_difference(found: list[int], error: tuple[float, int]) -> None:
    assert text_error(found, [1, 2, 3], lambda place, token: 0.25 * place) == error
