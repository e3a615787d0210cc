"""`loraplex twin compare`: a live run beside its simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded import TRUTH
from twin_commands import ENGINES, error_of, profile_in, twin, workload_in
from twins import imagined_machine

from loraplex.bench.records import RequestRecord
from loraplex.bench.report import summarize
from loraplex.perf.profile_json import write_profile
from loraplex.perf.slot_profile import write_slot_profile


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return workload_in(tmp_path)


@pytest.fixture(params=ENGINES)
def profile(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return profile_in(tmp_path, request.param)


def test_a_live_run_is_compared(profile: Path, workload: Path, tmp_path: Path) -> None:
    """With what a live run would write that went just so, but a fiftieth slower."""
    out, live = tmp_path / "out.json", tmp_path / "live.json"
    assert twin("run", profile, workload, "--json", str(out)).exit_code == 0
    report = summarize([slower(each) for each in json.loads(out.read_text())["requests"]]).as_json()
    live.write_text(json.dumps({"result": report}))
    compared, plot = tmp_path / "compared.json", tmp_path / "compared.png"
    args = ("compare", profile, workload, "--live", str(live), "--json", str(compared), "--plot", str(plot))
    done = twin(*args)
    assert done.exit_code == 0, done.output
    figures = json.loads(compared.read_text())
    for name in ("output_tok_s", "itl_s", "ttft_s"):
        assert figures[name]["smape"] == pytest.approx(1.98, abs=0.02)
    assert plot.read_bytes().startswith(b"\x89PNG")
    live.write_text(json.dumps({"results": report}))  # as `bench engine serve` has it
    assert twin("compare", profile, workload, "--live", str(live)).output == done.output.partition("wrote")[0]
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
        "max_step_tokens": 16,
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


@pytest.mark.parametrize("live", ["[]", '{"output_tokens_per_s": NaN}', '{"output_tokens_per_s": true}'])
def test_a_live_result_that_is_none_is_refused(
    live: str, profile: Path, workload: Path, tmp_path: Path
) -> None:
    path = tmp_path / "live.json"
    path.write_text(live)
    assert "the live result" in error_of(twin("compare", profile, workload, "--live", str(path)))
