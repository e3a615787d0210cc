from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from loraplex.bench.distribution import Distribution
from loraplex.bench.environment import environment, git_commit
from loraplex.bench.plots import plot_cdfs
from loraplex.bench.records import RequestRecord
from loraplex.bench.report import latencies, render, summarize


def record(arrival_s: float, *token_times_s: float, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        model="m",
        prompt_tokens=10,
        output_tokens=len(token_times_s),
        arrival_s=arrival_s,
        token_times_s=token_times_s,
        finish_s=token_times_s[-1] if token_times_s else arrival_s,
        error=error,
    )


def test_metrics_of_hand_made_timings() -> None:
    report = summarize([record(0.0, 1.0, 2.0, 4.0), record(1.0, 1.5, 2.5)])
    assert report.ttft_ms is not None
    assert report.tpot_ms is not None
    assert report.itl_ms is not None
    assert report.e2e_ms is not None
    assert report.ttft_ms.mean == pytest.approx(750)  # 1000 and 500
    assert report.tpot_ms.mean == pytest.approx(1250)  # (4 - 1) / 2 and (2.5 - 1.5) / 1
    assert report.itl_ms.mean == pytest.approx(4000 / 3)  # 1000, 2000, 1000
    assert report.e2e_ms.mean == pytest.approx(2750)  # 4000 and 1500
    assert report.duration_s == 4.0
    assert report.output_tokens_per_s == pytest.approx(5 / 4)
    assert report.total_tokens_per_s == pytest.approx(25 / 4)
    assert report.requests_per_s == pytest.approx(2 / 4)


def test_tpot_uses_true_token_counts_when_chunks_hold_several() -> None:
    coalesced = RequestRecord(
        model="m", prompt_tokens=1, output_tokens=5, arrival_s=0.0, token_times_s=(1.0, 3.0), finish_s=3.0
    )
    assert latencies([coalesced]).tpot_ms == [pytest.approx(500)]


def test_percentiles_are_interpolated() -> None:
    distribution = Distribution.of([float(value) for value in range(101)])
    assert distribution == Distribution(mean=50.0, p50=50.0, p95=95.0, p99=99.0)


def test_failures_are_counted_and_leave_no_latency_behind() -> None:
    records = [
        record(0.0, 1.0, 2.0),
        record(0.0, error="HTTP 500: boom"),
        record(0.0, 0.1, error="cut"),
        record(0.0, error="HTTP 500: boom"),
    ]
    report = summarize(records)
    assert (report.num_requests, report.num_failed) == (4, 3)
    assert report.errors == {"HTTP 500: boom": 2, "cut": 1}
    assert report.output_tokens == 2
    assert report.ttft_ms == Distribution(mean=1000.0, p50=1000.0, p95=1000.0, p99=1000.0)


def test_one_token_answers_have_no_tpot() -> None:
    report = summarize([record(0.0, 1.0)])
    assert report.tpot_ms is None
    assert report.itl_ms is None
    assert report.ttft_ms is not None


@pytest.mark.parametrize("records", [[], [record(0.0, error="refused")]])
def test_a_run_without_success_reports_nothing_instead_of_zeros(records: list[RequestRecord]) -> None:
    report = summarize(records)
    assert report.ttft_ms is None
    assert report.output_tokens_per_s == 0
    json.dumps(report.as_json(), allow_nan=False)


def test_the_table_shows_figures_and_errors() -> None:
    records = [record(0.0, 1.0, 2.0), *(record(0.0, error=f"[boom] {index}") for index in range(9))]
    stream = io.StringIO()
    Console(file=stream, width=100).print(render(summarize(records), title="a run"))
    text = stream.getvalue()
    assert "TTFT ms" in text
    assert "1,000 " in text
    assert "1 of 10 requests succeeded" in text
    assert "[boom] 0" in text
    assert "4 other errors" in text


@pytest.mark.parametrize("records", [[], [record(0.0, 1.0)], [record(0.0, 1.0, 2.0), record(0.5, 1.0, 4.0)]])
def test_the_plot_is_a_png(tmp_path: Path, records: list[RequestRecord]) -> None:
    plot_cdfs(latencies(records), tmp_path / "cdf.png", title="a run")
    assert (tmp_path / "cdf.png").read_bytes().startswith(b"\x89PNG")


def test_the_environment_names_machine_and_versions_but_no_host() -> None:
    import socket

    found = environment()
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["cpu"]
    assert found["packages"]["aiohttp"]
    assert socket.gethostname() not in json.dumps(found) or len(socket.gethostname()) < 4


def test_git_commit_is_none_outside_a_repository_and_marks_changes(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None

    def git(*args: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@t")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *args], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-q", "-m", "one")
    clean = git_commit(tmp_path)
    assert clean is not None
    assert "+" not in clean
    (tmp_path / "f").write_text("2")
    assert git_commit(tmp_path) == f"{clean}+dirty"
