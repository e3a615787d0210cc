"""`loraplex twin run`: a workload file on a profile, and what is written of it."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import TRUTH
from twin_commands import ENGINES, error_of, profile_in, twin, workload_in
from twins import random_workload

from loraplex.cli.twin_plot import draw_outcome
from loraplex.perf.slot_profile import write_slot_profile
from loraplex.twin.outcome import Outcome, RequestOutcome
from loraplex.workload.jsonl import WorkloadHeader, WorkloadRequest, read_workload, write_workload


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return workload_in(tmp_path)


@pytest.fixture(params=ENGINES)
def profile(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return profile_in(tmp_path, request.param)


def test_a_workload_is_simulated_written_and_drawn(profile: Path, workload: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    result = twin("run", profile, workload, "--json", str(out), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "50 of 50 requests served" in result.output
    found = json.loads(out.read_text())
    assert found["summary"]["num_served"] == len(found["requests"]) == 50
    timeline = found["timeline"]
    assert len(timeline["at_s"]) == len(timeline["running"]) == len(timeline["waiting"])
    ran_s = sum(each["finish_s"] - each["first_token_s"] for each in found["requests"])
    waited_s = sum(each["first_token_s"] - each["arrival_s"] for each in found["requests"])
    assert sum(timeline["running"]) * timeline["interval_s"] == pytest.approx(ran_s, rel=1e-3)
    assert sum(timeline["waiting"]) * timeline["interval_s"] == pytest.approx(waited_s, rel=1e-3)
    assert plot.stat().st_size > 1000
    refused = twin("run", profile, workload, "--plot", str(tmp_path / "out.txt"))
    assert refused.exit_code == 2
    assert "out.txt is no .png" in refused.output


def test_the_picture_shows_means_and_says_what_of() -> None:
    """Two requests that run for half of each second are one on the mean, at whatever instant one looks."""

    def request(arrival_s: float) -> WorkloadRequest:
        return WorkloadRequest(arrival_s=arrival_s, prompt_tokens=1, output_tokens=2, adapter=0)

    requests = [
        RequestOutcome(request(float(at)), first_token_s=float(at), finish_s=at + 0.5)
        for at in range(10)
        for _ in range(2)
    ]
    outcome = Outcome(
        requests=requests,
        duration_s=10.0,
        num_steps=10,
        num_loads=0,
        num_preemptions=0,
        mean_running=1.0,
        mean_waiting=0.0,
        gaps=(),
    )
    assert outcome.timeline(num_intervals=5).running == pytest.approx([1.0] * 5)
    [axes] = draw_outcome(outcome, workload="w.jsonl", profile="p.json").axes
    assert axes.get_title() == "w.jsonl on p.json"
    assert "mean over 0.1 s" in axes.get_ylabel()


def test_ranks_are_those_that_the_workload_names(workload: Path, tmp_path: Path) -> None:
    profile, named = tmp_path / "slots.json", tmp_path / "named.jsonl"
    write_slot_profile(profile, TRUTH)
    requests = read_workload(workload)
    num_adapters = 1 + max(request.adapter for request in requests)
    write_workload(named, requests, WorkloadHeader(ranks=(64,) * num_adapters))

    def summary(path: Path, *args: str) -> object:
        out = tmp_path / "out.json"
        result = twin("run", profile, path, "--json", str(out), *args)
        assert result.exit_code == 0, result.output
        return json.loads(out.read_text())["summary"]

    assert summary(named) == summary(workload, "--ranks", "64") != summary(workload)
    assert summary(named, "--ranks", "16") == summary(workload)


def test_an_overload_is_said(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "much.jsonl"
    write_workload(path, random_workload(1, num_requests=3000, rps=500.0))
    result = twin("run", profile, path, "--seconds", "6", "--kv-tokens", "4000")
    assert result.exit_code == 0, result.output
    assert "overloaded: it serves less than 90% of what is asked for" in result.output


def test_a_queue_that_shrinks_before_the_last_requests_come_is_no_overload(tmp_path: Path) -> None:
    """All at once first, and few in its last seconds."""
    profile, path, out = tmp_path / "profile.json", tmp_path / "early.jsonl", tmp_path / "out.json"
    write_slot_profile(profile, TRUTH)
    burst = [
        WorkloadRequest(arrival_s=1e-4 * number, prompt_tokens=60, output_tokens=60, adapter=number % 6)
        for number in range(600)
    ]
    tail = [
        WorkloadRequest(arrival_s=5.0 + 0.01 * number, prompt_tokens=10, output_tokens=2, adapter=number % 6)
        for number in range(200)
    ]
    write_workload(path, [*burst, *tail])
    result = twin("run", profile, path, "--json", str(out))
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["summary"]["starved"], "or the test shows nothing"
    assert "overloaded" not in result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_run_that_cannot_be_printed_is_saved(profile: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = (
        *(sys.executable, "-m", "loraplex.cli.main", "twin", "run"),
        *("--profile", profile, "--workload", workload, "--json", out),
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "the output cannot be written" in done.stderr
    assert json.loads(out.read_text())["summary"]["num_served"] > 0


def test_what_is_read_is_not_written_over(profile: Path, workload: Path, tmp_path: Path) -> None:
    live = tmp_path / "live.json"
    live.write_text("{}")
    before = [each.read_bytes() for each in (profile, workload, live)]
    for path in (profile, workload):
        result = twin("run", profile, workload, "--json", str(path))
        assert result.exit_code == 2
        assert "would be lost" in result.output
    assert twin("compare", profile, workload, "--live", str(live), "--json", str(live)).exit_code == 2
    assert [each.read_bytes() for each in (profile, workload, live)] == before


def test_a_disk_that_is_full_leaves_the_last_result(
    profile: Path, workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    out.write_text("the last one")

    def full(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    message = error_of(twin("run", profile, workload, "--json", str(out)))
    assert "cannot be written (No space left on device); make room" in message
    assert out.read_text() == "the last one"
    assert not list(tmp_path.glob(".*")), "half of a file is left"


def test_a_run_may_end_before_any_request_does(profile: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "out.json", tmp_path / "long.jsonl"
    write_workload(path, [WorkloadRequest(arrival_s=1.0, prompt_tokens=20, output_tokens=1000, adapter=0)])
    result = twin("run", profile, path, "--seconds", "3", "--json", str(out))
    assert result.exit_code == 0, result.output
    summary = json.loads(out.read_text())["summary"]
    assert summary["num_served"] == 0
    assert summary["output_tok_s"] > 0
    assert not summary["starved"]


def test_a_run_counts_from_the_first_request(profile: Path, workload: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "out.json", tmp_path / "later.jsonl"
    requests = read_workload(workload)
    write_workload(path, [replace(each, arrival_s=each.arrival_s + 1e6) for each in requests])
    summaries = []
    for each in (workload, path):
        assert twin("run", profile, each, "--seconds", "5", "--json", str(out)).exit_code == 0
        summaries.append(json.loads(out.read_text())["summary"])
    assert summaries[0]["num_requests"] > 0
    for name, value in summaries[0].items():
        assert summaries[1][name] == pytest.approx(value, rel=1e-4), name


def test_a_run_that_is_cut_off_counts_what_was_made_by_then(
    profile: Path, workload: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    assert twin("run", profile, workload, "--json", str(out)).exit_code == 0
    rows = json.loads(out.read_text())["requests"]
    assert twin("run", profile, workload, "--seconds", "5", "--json", str(out)).exit_code == 0
    summary = json.loads(out.read_text())["summary"]
    assert summary["num_requests"] == sum(row["arrival_s"] < 5 for row in rows)
    assert not summary["starved"]
    made = sum(
        (row["output_tokens"] - 1) * (min(row["finish_s"], 5) - row["first_token_s"])
        / max(row["finish_s"] - row["first_token_s"], 1e-9) + 1
        for row in rows
        if row["first_token_s"] < 5
    )  # fmt: skip
    assert summary["output_tok_s"] * 5 == pytest.approx(made, rel=0.1)


def test_figures_and_picture_are_two_files(profile: Path, workload: Path, tmp_path: Path) -> None:
    both = str(tmp_path / "both.png")
    result = twin("run", profile, workload, "--json", both, "--plot", both)
    assert result.exit_code == 2
    assert "--plot" in result.output


def test_lost_requests_are_told_of(workload: Path, tmp_path: Path) -> None:
    """A client with two connections; those whom it loses neither wait nor run."""
    profile, out = tmp_path / "slots.json", tmp_path / "out.json"
    write_slot_profile(profile, replace(TRUTH, client=replace(TRUTH.client, max_open=2)))
    result = twin("run", profile, workload, "--json", str(out))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    num_lost = found["summary"]["num_lost"]
    assert 0 < num_lost == sum(each["lost"] for each in found["requests"])
    assert found["summary"]["num_served"] == 50 - num_lost
    assert f"{num_lost} requests lost" in result.output
    assert max(found["timeline"]["waiting"]) <= 2
    assert found["timeline"]["waiting"][-1] == 0


def test_gaps_between_tokens_are_told(profile: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = twin("run", profile, workload, "--json", str(out))
    summary = json.loads(out.read_text())["summary"]
    assert 0 < summary["itl_s"]["p50"] <= summary["itl_s"]["p95"] <= summary["itl_s"]["p99"]
    assert summary["itl_s"]["p50"] == pytest.approx(summary["itl_mean_s"], rel=0.5)
    assert "ITL   ms  mean" in result.output
    assert f"{summary['num_loads']} loads of adapters" in result.output
