"""`loraplex bench engine cold` on a CPU, and the figures it makes of a replay."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from click.testing import Result
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from typer.testing import CliRunner

from loraplex.bench.adapter_files import save_random_adapters
from loraplex.bench.cold_scenarios import figures_of
from loraplex.bench.policy_plots import plot_policies
from loraplex.bench.records import RequestRecord
from loraplex.cli.main import app
from loraplex.core.cold_start import ColdStart
from loraplex.model.shapes import config_of_shape
from loraplex.workload.jsonl import WorkloadRequest, write_workload

SMALL = (
    "cold", "--device", "cpu", "--shape", "tiny", "--num-adapters", "2", "--prompt-tokens", "8",
    "--rank", "4",
)  # fmt: skip


def bench(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "engine", *SMALL, *args])


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "w.jsonl"
    write_workload(
        path,
        [WorkloadRequest(arrival_s=0.01 * i, prompt_tokens=5, output_tokens=4, adapter=0) for i in range(5)],
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("files", ["--files", "--no-files"])
def test_every_policy_is_compared_with_cached(workload: Path, tmp_path: Path, files: str) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    result = bench(
        files, "--workload", str(workload), "--burst", "3", "--json", str(out), "--plot", str(plot)
    )
    assert result.exit_code == 0, result.output
    assert (
        "left out on a CPU: pipelined, cpu-assist, which need a GPU; auto, which is overlap" in result.output
    )
    document = json.loads(out.read_text())
    assert (document["parameters"]["num_adapters"], document["parameters"]["workload_adapters"]) == (2, 5)
    found = document["results"]
    policies = {"cached", "on-demand", "overlap"}
    assert found["idle_ttft_ms"].keys() == found["burst"].keys() == found["workload"].keys() == policies
    assert found["idle_ttft_ms"]["cached"].keys() == {"ready"}
    where = "disk" if files == "--files" else "no files"
    assert found["idle_ttft_ms"]["overlap"].keys() == {where, "ready"}
    assert ("disk" in result.output) == (files == "--files")
    assert "2 adapters of rank 4 on q,k,v; 8 prompt tokens on an idle engine" in result.output
    assert found["workload"]["cached"]["over_cached"]["ttft_ms"] == {"mean": 0.0, "p95": 0.0}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_auto_is_overlap_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = bench("--policy", "auto", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "on a CPU, auto is overlap" in result.output
    assert json.loads(out.read_text())["results"]["idle_ttft_ms"].keys() == {"cached", "overlap"}


def test_requests_that_are_too_long_are_told_how_to_make_shorter_ones(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    write_workload(path, [WorkloadRequest(arrival_s=0.0, prompt_tokens=500, output_tokens=40, adapter=0)])
    result = bench("--workload", str(path))
    assert result.exit_code == 2
    fix = "`loraplex workload make` with --max-prompt-tokens 256 --max-output-tokens 256"
    assert fix in " ".join(result.output.replace("│", " ").split())


def test_one_policy_is_compared_with_cached_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert bench("--policy", "on-demand", "--json", str(out)).exit_code == 0
    assert json.loads(out.read_text())["results"]["idle_ttft_ms"].keys() == {"cached", "on-demand"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "pipelined"), "needs a GPU"),
        (("--policy", "magic"), "magic"),
        (("--plot", "a.png"), "--workload"),
        (("--workload", "w.jsonl", "--plot", "/nonexistent/a.png"), "for --plot: /nonexistent/a.png cannot"),
        (("--workload", "w.jsonl", "--plot", "a.txt"), "for --plot: a.txt is no .png"),
        (("--json", "/nonexistent/a.json"), "name a file in a folder that exists"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: tuple[str, ...], message: str) -> None:
    result = bench(*options)
    assert result.exit_code != 0
    assert message in " ".join((result.output + str(result.exception)).split())


def record(first_ms: float, gaps_ms: list[float]) -> RequestRecord:
    times = [first_ms / 1e3]
    for gap in gaps_ms:
        times.append(times[-1] + gap / 1e3)
    return RequestRecord(
        model="m", prompt_tokens=1, output_tokens=len(times), arrival_s=0.0, token_times_s=tuple(times),
        finish_s=times[-1], error=None,
    )  # fmt: skip


def test_overheads_and_pauses_are_told_by_what_cached_takes() -> None:
    found = figures_of(
        {
            ColdStart.CACHED: [record(10, [5, 5, 5, 5])] * 2,
            ColdStart.OVERLAP: [record(15, [5, 5, 5, 5]), record(15, [5, 20, 5, 8])],
        }
    )
    overlap = found[ColdStart.OVERLAP]
    assert overlap.overheads["ttft_ms"]["mean"] == pytest.approx(0.5)
    assert overlap.overheads["e2e_ms"]["mean"] == pytest.approx(((35 + 53) / 2) / 30 - 1)
    assert overlap.interruptions_per_request == pytest.approx(1.0)  # two gaps above 7.5 ms, two requests
    assert found[ColdStart.CACHED].interruptions_per_request == 0


def test_a_policy_has_one_colour_in_all_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    records = {
        policy: [record(10, [5, 5])] for policy in (ColdStart.CACHED, ColdStart.OVERLAP, ColdStart.AUTO)
    }
    plot_policies(figures_of(records), tmp_path / "a.png", title="t")
    bars, curves = drawn[0].axes
    of_bars = {each.get_label(): to_hex(each.patches[0].get_facecolor()) for each in bars.containers}
    of_curves = {each.get_label(): to_hex(each.get_color()) for each in curves.lines}
    assert of_bars.keys() == {"overlap", "auto"}
    assert of_curves == of_bars | {"cached": of_curves["cached"]}
    assert len(set(of_curves.values())) == 3


def test_saved_adapters_differ_and_are_whole(tmp_path: Path) -> None:
    import torch

    shape = config_of_shape("tiny").shape
    specs = save_random_adapters(
        tmp_path, shape, torch.bfloat16, count=2, rank=3, modules=("q_proj", "down_proj")
    )
    assert len({spec.version for spec in specs}) == 2
    assert {lora.module for lora in specs[0].modules} == {"q_proj", "down_proj"}
    assert specs[0].max_rank == 3
