"""`loraplex twin run` and `compare`: a workload file on a profile, and what is refused."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from recorded import TRUTH
from twins import imagined_machine, random_workload
from typer.testing import CliRunner

from loraplex.bench.records import RequestRecord
from loraplex.bench.report import summarize
from loraplex.cli.main import app
from loraplex.cli.twin_plot import draw_outcome
from loraplex.core.errors import CapacityError, LoraplexError
from loraplex.core.modules import MODULES
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.held_out import HeldOut
from loraplex.perf.least_squares import FitQuality
from loraplex.perf.profile_json import write_profile
from loraplex.perf.slot_profile import write_slot_profile
from loraplex.twin.outcome import Outcome, RequestOutcome
from loraplex.twin.replay import OwnEngines, ReplayOptions, longest_of
from loraplex.workload.jsonl import WorkloadHeader, WorkloadRequest, read_workload, write_workload


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.jsonl"
    write_workload(path, random_workload(1, num_requests=50, rps=5.0))
    return path


@pytest.fixture(params=["slots", "ours"])
def profile(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    if request.param == "slots":
        write_slot_profile(path, TRUTH)
    else:
        write_profile(path, imagined_machine())
    return path


def twin(command: str, profile: Path, workload: Path, *args: str) -> Result:
    return CliRunner().invoke(
        app, ["twin", command, "--profile", str(profile), "--workload", str(workload), *args]
    )


def error_of(result: Result) -> str:
    assert isinstance(result.exception, LoraplexError), result.output
    return str(result.exception)


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


def test_a_live_run_is_compared(profile: Path, workload: Path, tmp_path: Path) -> None:
    """With what a live run would write that went just so, but a fiftieth slower."""
    out, live = tmp_path / "out.json", tmp_path / "live.json"
    assert twin("run", profile, workload, "--json", str(out)).exit_code == 0
    report = summarize([slower(each) for each in json.loads(out.read_text())["requests"]]).as_json()
    live.write_text(json.dumps({"result": report}))
    compared = tmp_path / "compared.json"
    done = twin("compare", profile, workload, "--live", str(live), "--json", str(compared))
    assert done.exit_code == 0, done.output
    figures = json.loads(compared.read_text())
    for name in ("output_tok_s", "itl_s", "ttft_s"):
        assert figures[name]["smape"] == pytest.approx(1.98, abs=0.02)
    live.write_text(json.dumps({"results": report}))  # as `bench engine serve` has it
    assert (
        twin("compare", profile, workload, "--live", str(live)).output == done.output.rpartition("wrote")[0]
    )
    live.write_text(json.dumps({"result": {**report, "prompt_tokens": 7}}))
    assert "of 7 prompt tokens, the workload has" in error_of(
        twin("compare", profile, workload, "--live", str(live))
    )
    live.write_text(json.dumps({"result": {"output_tokens_per_s": 1.0}}))
    assert "has no itl_ms.mean" in error_of(twin("compare", profile, workload, "--live", str(live)))


def slower(row: dict[str, Any]) -> RequestRecord:
    """Every moment comes at 1.02 times its time."""
    arrival_s, first_s, finish_s = (1.02 * row[name] for name in ("arrival_s", "first_token_s", "finish_s"))
    num_tokens = row["output_tokens"]
    gap_s = (finish_s - first_s) / max(num_tokens - 1, 1)
    return RequestRecord(
        model="",
        prompt_tokens=row["prompt_tokens"],
        output_tokens=num_tokens,
        arrival_s=arrival_s,
        token_times_s=tuple(first_s + place * gap_s for place in range(num_tokens)),
        finish_s=finish_s,
    )


def test_a_live_run_tells_of_its_engine(workload: Path, tmp_path: Path) -> None:
    """Its adapters, memory and steps are the twin's unless options say otherwise."""
    profile, live = tmp_path / "profile.json", tmp_path / "live.json"
    write_profile(profile, imagined_machine())
    report = {"output_tokens_per_s": 1.0, "itl_ms": {"mean": 1.0}, "ttft_ms": {"mean": 1.0}}
    told = {
        "device": "cuda",
        "num_adapters": 2,
        "ranks": "64,8",
        "modules": "all",
        "kv_tokens": 4096,
        "max_step_tokens": 64,
        "position_cost": 0.01,
    }

    def ttft_s(parameters: dict[str, Any], *args: str) -> float:
        live.write_text(json.dumps({"results": report, "parameters": parameters}))
        out = tmp_path / "compared.json"
        done = twin("compare", profile, workload, "--live", str(live), "--json", str(out), *args)
        assert done.exit_code == 0, done.output
        return float(json.loads(out.read_text())["ttft_s"]["twin"])

    as_told = ttft_s(told)
    assert as_told != ttft_s({})
    for name, other in (("ranks", "8"), ("modules", "q"), ("kv_tokens", 1024), ("max_step_tokens", 512)):
        assert ttft_s({**told, name: other}) != as_told
    assert ttft_s({**told, "num_adapters": 0}) < as_told
    assert ttft_s({**told, "kv_tokens": 1024}, "--kv-tokens", "4096") == as_told
    live.write_text(json.dumps({"results": report, "parameters": {**told, "device": "cpu"}}))
    message = error_of(twin("compare", profile, workload, "--live", str(live)))
    assert (
        message == f"{live}: it is a run on cpu, and the profile is of cuda; give one that was measured there"
    )
    slots = tmp_path / "slots.json"
    write_slot_profile(slots, TRUTH)
    live.write_text(json.dumps({"results": report, "parameters": told}))
    message = error_of(twin("compare", slots, workload, "--live", str(live)))
    assert "a run of our own engine, and the profile is of one with slots" in message
    del told["max_step_tokens"]
    live.write_text(json.dumps({"results": report, "parameters": told}))
    message = error_of(twin("compare", profile, workload, "--live", str(live)))
    assert "the live result's parameters cannot be read ('max_step_tokens')" in message


def test_a_live_run_of_another_workload_is_refused(profile: Path, workload: Path, tmp_path: Path) -> None:
    live = tmp_path / "live.json"
    live.write_text(json.dumps({"result": {"num_requests": 171, "output_tokens_per_s": 1.0}}))
    message = error_of(twin("compare", profile, workload, "--live", str(live)))
    assert message.startswith(f"{live}: ")
    assert "is of 171 requests, the workload has 50" in message


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


def test_options_without_effect_are_refused(workload: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(profile, imagined_machine())
    assert "leave --slots out" in error_of(twin("run", profile, workload, "--slots", "4"))


def test_an_unknown_adapter_is_refused(profile: Path, workload: Path) -> None:
    message = error_of(twin("run", profile, workload, "--adapters", "3"))
    assert message.startswith("request ")
    assert "there are 3, counted from 0" in message


def test_a_memory_too_small_for_one_request_is_refused(profile: Path, workload: Path) -> None:
    assert "too few for a request of" in error_of(twin("run", profile, workload, "--kv-tokens", "64"))


@pytest.mark.parametrize("shared", [True, False])
def test_memory_and_the_sizes_of_adapters_are_the_profiles(
    shared: bool, workload: Path, tmp_path: Path
) -> None:
    """One token of KV cache a kilobyte, one rank of one module a kilobyte: what fits follows from it."""
    memory = EngineMemory(
        max_context=1 << 17,
        token_bytes=1 << 10,
        block_tokens=16,
        arena_bytes=256 << 10 if shared else None,
        kv_tokens=None if shared else 256,
        host_bytes=1 << 20,
        table_bytes=0,
        rank_bytes=dict.fromkeys(MODULES, 1 << 10),
    )
    profile = tmp_path / "profile.json"
    write_profile(profile, replace(imagined_machine(), memory=memory))
    longest = longest_of(read_workload(workload))
    small = twin("run", profile, workload, "--ranks", "1", "--kv-tokens", str(longest + 64))
    assert small.exit_code == 0, small.output
    too_little = error_of(twin("run", profile, workload, "--ranks", "1", "--kv-tokens", "64"))
    assert "KV memory holds" in too_little
    assert "too few for a request of" in too_little
    write_profile(profile, replace(imagined_machine(), memory=replace(memory, max_context=longest - 1)))
    too_long = error_of(twin("run", profile, workload, "--ranks", "1", "--kv-tokens", str(longest + 64)))
    assert f"context holds {longest - 1} tokens, too few for a request of {longest}" in too_long
    # An adapter of rank 16 on all modules takes 112 kilobytes; beside one, 144 tokens are left of 256.
    OwnEngines(
        replace(imagined_machine(), memory=memory),
        ReplayOptions(num_adapters=1, ranks=(16,), modules=MODULES),
        longest=144,
    )
    with pytest.raises(CapacityError, match="holds 144 tokens" if shared else "holds 256 tokens"):
        OwnEngines(
            replace(imagined_machine(), memory=memory),
            ReplayOptions(num_adapters=1, ranks=(16,), modules=MODULES),
            longest=257,
        )


def test_adapters_are_as_large_as_they_are_said_to_be() -> None:
    def sizes(**options: Any) -> list[int]:
        chosen = ReplayOptions(num_adapters=3, ranks=(8, 64), **options)
        return list(OwnEngines(imagined_machine(), chosen, longest=10).adapter_bytes.values())

    rank_bytes = 512 << 10
    assert sizes() == [24 * rank_bytes, 192 * rank_bytes, 24 * rank_bytes], "on q, k and v"
    assert sizes(modules=("q_proj",)) == [8 * rank_bytes, 64 * rank_bytes, 8 * rank_bytes]
    assert sizes(rank_bytes=1000) == [8000, 64000, 8000]
    assert sizes(adapter_bytes=1000) == [1000] * 3


def test_a_profile_that_says_nothing_of_memory_is_refused(workload: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(profile, replace(imagined_machine(), memory=None))
    assert "has no 'memory'" in error_of(twin("run", profile, workload))


@pytest.mark.parametrize("size", ["inf", "nan", "0", "-1"])
def test_sizes_that_are_none_are_refused(size: str, profile: Path, workload: Path) -> None:
    result = twin("run", profile, workload, "--adapter-mib", size)
    assert result.exit_code == 2
    assert "must be more than 0" in result.output


def test_an_adapter_that_does_not_fit_is_refused(workload: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(profile, imagined_machine())
    message = error_of(twin("run", profile, workload, "--adapter-mib", "1000000"))
    assert "KV memory holds 0 tokens beside an adapter of 1000000 MiB" in message


@pytest.mark.parametrize("live", ["[]", '{"output_tokens_per_s": NaN}', '{"output_tokens_per_s": true}'])
def test_a_live_result_that_is_none_is_refused(
    live: str, profile: Path, workload: Path, tmp_path: Path
) -> None:
    path = tmp_path / "live.json"
    path.write_text(live)
    assert "the live result" in error_of(twin("compare", profile, workload, "--live", str(path)))


@pytest.mark.parametrize("profile", ["ours"], indirect=True)
def test_modules_are_named_as_elsewhere(profile: Path, workload: Path) -> None:
    assert twin("run", profile, workload, "--modules", "all").exit_code == 0
    assert "unknown module 'w'" in error_of(twin("run", profile, workload, "--modules", "q,w"))


@pytest.mark.parametrize("profile", ["slots"], indirect=True)
@pytest.mark.parametrize(
    "option",
    [("--modules", "all"), ("--max-running", "8"), ("--adapter-mib", "25")],
    ids=lambda option: option[0],
)
def test_options_that_slots_do_not_have_are_refused(
    option: tuple[str, str], profile: Path, workload: Path
) -> None:
    message = error_of(twin("run", profile, workload, *option))
    assert message == (f"the profile is of an engine with slots, which it says all of; leave {option[0]} out")


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


def test_an_adapter_far_beyond_the_others_is_asked_about(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "far.jsonl"
    write_workload(path, [replace(random_workload(1, num_requests=1)[0], adapter=10**9)])
    assert "so there would be 1,000,000,001; give --adapters" in error_of(twin("run", profile, path))


def test_figures_and_picture_are_two_files(profile: Path, workload: Path, tmp_path: Path) -> None:
    both = str(tmp_path / "both.png")
    result = twin("run", profile, workload, "--json", both, "--plot", both)
    assert result.exit_code == 2
    assert "--plot" in result.output


def test_a_poor_profile_is_warned_of_in_one_line(workload: Path, tmp_path: Path) -> None:
    path = tmp_path / "poor.json"

    def warnings(r_squared: float) -> list[str]:
        poor = FitQuality(num_samples=9, r_squared=r_squared, mean_error=0.46, worst_error=1.0)
        held_out = HeldOut(decode=poor, prefill=poor, serving=None, load=poor)
        write_profile(path, replace(imagined_machine(), held_out=held_out))
        return list(twin("run", path, workload).stderr.splitlines())

    [off] = warnings(0.9)
    assert "off by 46% on the mean" in off
    [poor] = warnings(0.2)
    assert poor.startswith("warning: R² of held out: decode, held out: prefill, held out: load is under 0.5")
    assert "the twin is no better than poor.json" in poor
    write_profile(path, imagined_machine())
    assert twin("run", path, workload).stderr == ""


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


def test_a_profile_of_another_model_is_refused(profile: Path, workload: Path) -> None:
    assert "not 'llama'" in error_of(twin("run", profile, workload, "--model", "llama"))


def test_a_profile_with_a_part_missing_is_refused(profile: Path, workload: Path) -> None:
    document = json.loads(profile.read_text())
    part = "memory" if "memory" in document else "disk"
    del document[part]
    profile.write_text(json.dumps(document))
    assert f"has no '{part}'" in error_of(twin("run", profile, workload))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"arrival_s": 0.0, "prompt_tokens": 1, "output_tokens": 1, "adapter": 0}', ":51: arrival_s 0.0 is"),
        ('{"arrival_s": 1e6, "prompt_tokens": -1, "output_tokens": 1, "adapter": 0}', ":51: prompt_tokens"),
    ],
)
def test_a_bad_line_of_a_workload_is_refused(profile: Path, workload: Path, line: str, says: str) -> None:
    with workload.open("a") as file:
        file.write(line + "\n")
    assert says in error_of(twin("run", profile, workload))
