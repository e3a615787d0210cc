"""`loraplex bench kernels`: what it refuses before it measures, and what it makes of the measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.errors import CapacityError, LoraplexError, ModelError

ROW = {
    "adapters": 16, "rank": 64,
    "shrink_mb": 25.17, "shrink_us": 10.0, "shrink_tb_per_s": 2.5,
    "expand_mb": 25.17, "expand_us": 8.0, "expand_tb_per_s": 3.0,
}  # fmt: skip


def bench(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "kernels", *args])


def words(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A device that is not there; what would have been measured on it."""
    calls: list[tuple[object, ...]] = []

    def measure_kernels(
        shape: str, num_adapters: Sequence[int], ranks: Sequence[int]
    ) -> tuple[float, list[dict[str, Any]]]:
        calls.append((shape, num_adapters, ranks))
        if 512 in ranks:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return 4.0, [ROW]

    scenarios = ModuleType("loraplex.bench.kernel_scenarios")
    scenarios.measure_kernels = measure_kernels  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, scenarios.__name__, scenarios)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("loraplex.bench.environment.gpu", lambda: {"gpu": "none"})
    return calls


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--num-adapters", "0"), "0 is not between 1 and 256"),
        (("--num-adapters", "16,-1"), "-1 is not between 1 and 256"),
        (("--num-adapters", "257"), "257 is not between 1 and 256"),
        (("--num-adapters", "16,,32"), "'16,,32' is not a list of numbers such as 16,32"),
        (("--ranks", "0"), "0 is not between 1 and 512"),
        (("--ranks", "64,513"), "513 is not between 1 and 512"),
        (("--ranks", "a"), "'a' is not a list of numbers"),
        (("--ranks", ""), "'' is not a list of numbers"),
        (("--json", "/no/such/folder/out.json"), "name a file in a folder that exists"),
        (("--json", "/"), "/ cannot be written"),
    ],
    ids=str,
)
def test_bad_usage_is_refused_before_anything_is_measured(
    args: tuple[str, ...], reason: str, measured: list[tuple[object, ...]]
) -> None:
    result = bench(*args)
    assert result.exit_code == 2
    assert reason in words(result)
    assert not measured


def test_an_unknown_shape_is_answered_with_those_there_are(measured: list[tuple[object, ...]]) -> None:
    result = bench("--shape", "llama-9")
    assert isinstance(result.exception, LoraplexError)
    assert "unknown shape 'llama-9'; known are tiny, llama-2-7b" in str(result.exception)
    assert not measured


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_error_says_what_to_do() -> None:
    result = bench()
    assert isinstance(result.exception, ModelError)
    assert "there is no CUDA device here" in str(result.exception)
    assert "loraplex bench engine decode --device cpu" in str(result.exception)


def test_figures_are_shown_beside_the_devices_own_and_written(
    tmp_path: Path, measured: list[tuple[object, ...]]
) -> None:
    out = tmp_path / "out.json"
    result = bench("--shape", "tiny", "--num-adapters", "16", "--ranks", "64", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert measured == [("tiny", [16], [64])]
    assert "16 64 shrink 25.17 10.00 2.50 62%" in words(result)
    assert "16 64 expand 25.17 8.00 3.00 75%" in words(result)
    found = json.loads(out.read_text())
    assert found["parameters"] == {"shape": "tiny", "num_adapters": [16], "ranks": [64]}
    assert found["results"]["copy_tb_per_s"] == 4.0
    assert [row["share_of_copy"] for row in found["results"]["rows"]] == [0.625, 0.75]


def test_adapters_beyond_the_devices_memory_end_in_words(measured: list[tuple[object, ...]]) -> None:
    result = bench("--num-adapters", "256", "--ranks", "512")
    assert isinstance(result.exception, CapacityError)
    assert "256 adapters of rank 512; lower --num-adapters or --ranks" in str(result.exception)


def test_help_needs_neither_torch_nor_triton() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from loraplex.cli.main import app; app(['bench', 'kernels', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--num-adapters" in done.stdout
