"""`loraplex bench engine` on a CPU: what it measures, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.batching import DelayBound
from loraplex.core.errors import LoraplexError
from loraplex.scheduling.work import StepWork
from loraplex.twin.compare import engine_of
from loraplex.workload.jsonl import WorkloadRequest, write_workload
from loraplex.workload.request import WorkloadHeader

CPU = ("--device", "cpu", "--shape", "tiny", "--dtype", "float32")


def bench(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "engine", *args])


@pytest.mark.parametrize("adapters", ["none", "one", "distinct"])
def test_decode_measures_the_gaps_between_tokens(tmp_path: Path, adapters: str) -> None:
    out = tmp_path / "out.json"
    result = bench(
        "decode", *CPU, "--batch", "3", "--adapters", adapters, "--rank", "4", "--output-tokens", "20",
        "--repeats", "1", "--json", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["parameters"]["num_adapters"] == {"none": 0, "one": 1, "distinct": 3}[adapters]
    assert found["results"]["itl_ms"].keys() == {"mean", "p50", "p95", "p99"}
    assert found["packages"]["torch"]
    described = {
        "none": "no adapters",
        "one": "1 adapter of rank 4 on",
        "distinct": "3 adapters of rank 4 on",
    }
    assert described[adapters] in result.output


def test_prefill_reports_its_times() -> None:
    result = bench("prefill", *CPU, "--threads", "1", "--prompt-tokens", "8", "--repeats", "1")
    subject, figures = result.output.splitlines()
    assert subject.startswith("tiny (llama-")
    assert ", float32, on cpu, 1 thread of " in subject
    assert subject.endswith("; no adapters; batch 1, 8 prompt tokens each")
    assert figures.startswith("prefill_ms: mean")


def workload(path: Path, *, prompt_tokens: int = 5) -> Path:
    requests = [
        WorkloadRequest(arrival_s=0.01 * i, prompt_tokens=prompt_tokens, output_tokens=3, adapter=i)
        for i in range(6)
    ]
    write_workload(path, requests)
    return path


def test_serve_replays_every_request(tmp_path: Path) -> None:
    file, out = workload(tmp_path / "w.jsonl"), tmp_path / "out.json"
    result = bench(
        "serve", *CPU, "--workload", str(file), "--num-adapters", "4", "--ranks", "1,8", "--json", str(out)
    )
    assert result.exit_code == 0, result.output
    assert "; 4 adapters of 2 ranks from 1 to 8 on q,k,v; 6 requests\n" in result.output
    document = json.loads(out.read_text())
    found = document["results"]
    assert (found["num_requests"], found["num_failed"], found["output_tokens"]) == (6, 0, 18)
    assert {"ttft_ms", "tpt_ms", "itl_ms", "e2e_ms"} <= found.keys()
    assert found["tpt_ms"]["mean"] == pytest.approx(found["e2e_ms"]["mean"] / 3, rel=0.01)
    # Enough for a twin of it.
    engine = engine_of(document)
    assert engine is not None
    assert (engine.num_adapters, engine.ranks, engine.kv_tokens) == (4, (1, 8), 512 * 16)
    assert engine.work == StepWork(max_tokens=2048)


@pytest.mark.parametrize("batching", ["fcfs", "merged", "auto"])
def test_serve_batches_by_the_policy_that_is_asked_for(tmp_path: Path, batching: str) -> None:
    file, out = workload(tmp_path / "w.jsonl"), tmp_path / "out.json"
    bound = ("--max-delay-by-grouping", "10%") if batching == "auto" else ()
    result = bench(
        "serve", *CPU, "--workload", str(file), "--num-adapters", "2", "--rank", "4", "--batching", batching,
        *bound, "--json", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    found = document["results"]
    assert found["num_failed"] == 0
    assert ("of steps merged" in result.output) == (batching != "fcfs")
    if batching == "merged":
        assert 0 < found["num_merged_steps"] <= found["num_steps"]
    engine = engine_of(document)  # its twin batches alike
    assert engine is not None
    assert engine.batching == batching
    assert engine.max_delay == (DelayBound(share=0.1, seconds=0.0) if bound else DelayBound())


def test_merged_steps_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = bench(
        "decode", *CPU, "--batch", "2", "--adapters", "one", "--rank", "4", "--prompt-tokens", "8",
        "--output-tokens", "16", "--repeats", "1", "--batching", "merged", "--json", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "1 merge, " in result.output
    found = json.loads(out.read_text())["results"]
    assert found["num_merges"] == 1
    assert found["num_merged_steps"] >= 2 * 15, "all decodes; prompts begin before their adapter is pinned"


def test_a_bound_is_refused_with_a_policy_that_has_none(tmp_path: Path) -> None:
    file = workload(tmp_path / "w.jsonl")
    result = bench("serve", *CPU, "--workload", str(file), "--max-delay-by-grouping", "10%")
    assert result.exit_code == 2
    assert "the bound is for batching by grouped or auto" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("args", "num_adapters", "ranks"),
    [
        ((), 3, (2, 8, 2)),
        (("--num-adapters", "2"), 2, (2, 8, 2)),
        (("--rank", "4"), 3, (4,)),
        (("--num-adapters", "6", "--ranks", "1,3"), 6, (1, 3)),
    ],
)
def test_adapters_are_those_of_the_header_unless_options_say_otherwise(
    tmp_path: Path, args: tuple[str, ...], num_adapters: int, ranks: tuple[int, ...]
) -> None:
    file, out = tmp_path / "w.jsonl", tmp_path / "out.json"
    request = WorkloadRequest(arrival_s=0.0, prompt_tokens=2, output_tokens=1, adapter=2)
    write_workload(file, [request], WorkloadHeader(ranks=(2, 8, 2)))
    result = bench("serve", *CPU, "--no-warm-up", "--workload", str(file), *args, "--json", str(out))
    assert result.exit_code == 0, result.output
    engine = engine_of(json.loads(out.read_text()))
    assert engine is not None
    assert (engine.num_adapters, engine.ranks) == (num_adapters, ranks)


def test_a_header_with_ranks_that_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    request = WorkloadRequest(arrival_s=0.0, prompt_tokens=2, output_tokens=1, adapter=0)
    write_workload(file, [request], WorkloadHeader(ranks=(1024,)))
    result = bench("serve", *CPU, "--workload", str(file))
    assert result.exit_code == 2
    assert "w.jsonl has adapters of rank 1024" in " ".join(result.output.replace("│", " ").split())


def test_a_workload_is_not_written_over(tmp_path: Path) -> None:
    file = workload(tmp_path / "w.jsonl")
    before = file.read_text()
    result = bench("serve", *CPU, "--workload", str(file), "--json", str(file))
    assert result.exit_code == 2
    assert "would be lost; name another" in result.output
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("decode", *CPU, "--ranks", "8,x"), "is not a list of numbers"),
        (("decode", *CPU, "--ranks", "0"), "ranks go from 1 to 512"),
        (("decode", "--device", "cpu", "--shape", "tiny", "--dtype", "int8"), "choose float32"),
    ],
    ids=["ranks", "rank 0", "dtype"],
)
def test_bad_usage_says_what_would_be_good(args: tuple[str, ...], reason: str) -> None:
    result = bench(*args)
    assert result.exit_code == 2
    assert reason in " ".join(result.output.replace("│", " ").split())


def test_a_request_beyond_the_context_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = workload(tmp_path / "w.jsonl", prompt_tokens=900)
    result = bench("serve", *CPU, "--workload", str(file), "--num-adapters", "0")
    assert result.exit_code == 2
    assert "w.jsonl, request 1" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--shape", "llama-9"), "known are tiny, llama-2-7b"),
        (("--shape", "llama-2-7b"), "too large for --device cpu"),
        (("--shape", "tiny", "--modules", "lm_head"), "unknown module"),
    ],
    ids=["shape", "large shape", "module"],
)
def test_what_does_not_exist_is_answered_with_what_does(args: tuple[str, ...], reason: str) -> None:
    result = bench("decode", "--device", "cpu", "--dtype", "float32", "--adapters", "one", *args)
    assert isinstance(result.exception, LoraplexError)
    assert reason in str(result.exception)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("decode", "--json", "/nonexistent/a.json"), "name a file in a folder that exists"),
        (("prefill", "--json", "/"), "cannot be written"),
        (("cold", "--json", "/nonexistent/a.json"), "name a file in a folder that exists"),
        (("decode", "--prompt-tokens", "400", "--output-tokens", "200"), "600 tokens with the answer"),
        (("prefill", "--prompt-tokens", "512"), "513 tokens with the answer"),
    ],
)
def test_what_could_not_be_measured_or_kept_is_said_before(args: tuple[str, ...], message: str) -> None:
    command, *rest = args
    result = bench(command, *CPU, *rest)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_module_is_named_as_it_was_written() -> None:
    assert "unknown module 'zz'" in str(bench("decode", *CPU, "--modules", "q,zz").exception)
