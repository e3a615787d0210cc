"""The scripts behind the published numbers must start, stop and count right before they are believed."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fake_openai import FakeServer

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import (
    assist,
    cpu_serve,
    cpu_tables,
    engines,
    gpu_cold,
    gpu_start,
    gpu_tables,
    make_tables,
    shared_cpu,
    structured_output,
    table_steps,
    waiting_queue,
)
from benchmarks.bystanders import bystanders
from benchmarks.http_checkpoint import HttpCheckpoint
from benchmarks.make_checkpoint import SERVED, Checkpoint, write_adapters, write_tokenizer
from benchmarks.measure import Traffic, measure, with_median
from benchmarks.servers import ServerCommand, ServerFailedError, running
from benchmarks.table_steps import measure_tables
from loraplex.bench.distribution import Distribution
from loraplex.bench.random_engine import build_random_engine
from loraplex.bench.report import Report
from loraplex.engine.core import Engine
from loraplex.engine.torch_executor import TorchExecutor
from loraplex.workload.jsonl import WorkloadRequest, write_workload


def report(tokens_per_s: float, *, num_failed: int = 0) -> dict[str, Any]:
    one = Distribution(mean=tokens_per_s, p50=1.0, p95=1.0, p99=2.0)
    return Report(
        num_requests=48,
        num_failed=num_failed,
        duration_s=1.0,
        prompt_tokens=1,
        output_tokens=1,
        output_tokens_per_s=tokens_per_s,
        total_tokens_per_s=3 * tokens_per_s,
        requests_per_s=1.0,
        ttft_ms=one,
        tpot_ms=one,
        itl_ms=one,
        e2e_ms=one,
    ).as_json()


def test_a_server_is_started_polled_and_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import http.server, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)"
        ".serve_forever()\n"
    )
    command = ServerCommand(args=(sys.executable, "-c", code, "{port}"), health_path="/")
    with running(command, log_path=tmp_path / "log") as server:
        child_pid = int((tmp_path / "log").read_text().split()[0])
        os.kill(child_pid, 0)
        assert server.start_s > 0
    assert not _alive(server.pid)
    assert not _alive(child_pid)


def _alive(pid: int) -> bool:
    """Gone, or a zombie that nobody has reaped yet (orphans are reaped by init, in its own time)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_server_that_dies_at_start_is_reported_with_its_log(tmp_path: Path) -> None:
    command = ServerCommand(args=(sys.executable, "-c", "import sys; sys.exit('bad option')"))
    with pytest.raises(ServerFailedError, match="bad option"), running(command, log_path=tmp_path / "log"):
        pass


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    command = ServerCommand(args=("/no/such/program",))
    with (
        pytest.raises(ServerFailedError, match="/no/such/program"),
        running(command, log_path=tmp_path / "l"),
    ):
        pass


def test_bystanders_hold_their_connections_while_others_are_served(fake: FakeServer) -> None:
    long = Traffic(prompt_tokens=4, output_tokens=2000)
    *slow, probe = long.requests(["s"], seed=1, num_requests=4)

    async def main() -> Report:
        async with bystanders(fake.base_url, num_idle=5, slow_requests=slow, probe=probe):
            assert fake.num_open == len(slow)  # still writing to readers that do not read
            requests = Traffic(num_requests=6, prompt_tokens=4, output_tokens=3).requests(["m"], seed=2)
            return await measure(fake.base_url, requests, concurrency=3)

    assert asyncio.run(main()).num_failed == 0


def test_medians_keep_every_run_and_sum_failures() -> None:
    summary = with_median([report(10.0), report(30.0, num_failed=2), report(20.0)])
    assert summary["median"]["output_tokens_per_s"] == 20.0
    assert summary["median"]["tpot_ms.p99"] == 2.0
    assert summary["num_failed"] == 2
    assert len(summary["runs"]) == 3


def test_shown_commands_hold_no_folders(tmp_path: Path) -> None:
    served = Checkpoint(root=tmp_path / "ckpt", num_adapters=2)
    engine = engines.loraplex(served, state_dir=tmp_path / "state")
    shown = cpu_serve.shown_command(engine)
    assert (
        shown
        == "loraplex serve --model base --adapters adapters --dtype float32 --port {port} --state-dir state"
    )


def test_adapters_are_what_peft_writes(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from safetensors import safe_open

    write_adapters(tmp_path, base=tmp_path / "base", num_adapters=5, seed=0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["lora-0000", "lora-0001", "lora-0002", "lora-0003", "lora-0004"]
    for name, rank in zip(names, (*SERVED.ranks, SERVED.ranks[0]), strict=True):
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", rank, 2 * rank)
        with safe_open(tmp_path / name / "adapter_model.safetensors", "np") as weights:
            tensors = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118
        assert len(tensors) == 8 * 4 * 2
        assert sum(tensor.nbytes for tensor in tensors.values()) == SERVED.adapter_bytes(rank)
        assert all(tensor.any() for tensor in tensors.values())


def test_every_plain_token_of_the_tokenizer_decodes_to_text_of_its_own(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 4096
    texts = [tokenizer.decode([token_id]) for token_id in range(3, 4096)]
    assert all(texts)
    assert len(set(texts)) == len(texts)
    assert tokenizer.decode(tokenizer.encode("hello, big world").ids) == "hello, big world"


def results() -> dict[str, Any]:
    """Two measurements, the second of them twice as fast in all but what adapters do to us."""
    return {"measurements": [measurement(1.0, 250.0), measurement(2.0, 400.0)]}


def measurement(faster: float, our_adapters: float) -> dict[str, Any]:
    def row(engine: str, traffic: str, tokens_per_s: float) -> dict[str, Any]:
        about = {"label": engine, "version": "1", "command": f"{engine} serve", "env": {"A": "b"}}
        runs = with_median([report(tokens_per_s)])
        return {"engine": engine, "traffic": traffic, "start_s": [2.0, 1.5], **about, **runs}

    serve = [
        row("ours", "base", 300.0 * faster),
        row("ours", "adapters", our_adapters),
        row("theirs", "base", 200.0 * faster),
    ]

    pair = with_median([report(100.0)])
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "CPU", "cores": 2, "os": "Linux 6"},
        "python": "3.11.0",
        "packages": {"torch": "2.0"},
        "git_commit": None,
        "parameters": {
            "adapters": 16,
            "repeats": 5,
            "model": "random Llama (x)",
            "traffic": {"num_requests": 48, "concurrency": 16, "prompt_tokens": 64, "output_tokens": 32},
        },
        "serve": serve,
        "many-adapters": {
            "adapters_on_disk": 1000,
            "adapters_that_fit": 100,
            "registration": None,
            "start_s": 3.2,
            "all_in_memory": pair,
            "in_turn": pair,
        },
        "bystanders": {"idle_clients": 64, "slow_readers": 16, "alone": pair, "among_bystanders": pair},
    }


def kernel_results() -> dict[str, Any]:
    parts = {"linears": 8.0, "attention": 1.0, "add_lora": 2.0}
    step = {name: {"total_ms": 10.0, "parts_ms": parts} for name in ("base", "adapters")}
    return {
        "read_gb_per_s": {"50 MB": 40.0, "1000 MB": 20.0},
        "launch_us": 2.0,
        "linears_ms": {"16 rows": {"F.linear": 14.0, "packed": 7.0}},
        "weights_mb": 100.0,
        "steps": {"adapter_mb": 50.0, "prefill": step, "decode": step},
    }


@pytest.fixture
def results_folder(tmp_path: Path) -> Path:
    (tmp_path / make_tables.SERVE).write_text(json.dumps(results()))
    (tmp_path / make_tables.KERNELS).write_text(json.dumps(kernel_results()))
    # Nothing here can make the others: the committed ones stand in for them.
    needed = {
        file for table in make_tables.TABLES.values() if table.if_missing is None for file in table.files
    }
    for name in needed - {make_tables.SERVE, make_tables.KERNELS}:
        shutil.copy(make_tables.RESULTS / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", list(make_tables.TABLES))
def test_every_table_can_be_made_and_remade(name: str, results_folder: Path) -> None:
    document = f"before\n<!-- table:{name} -->\nold\n<!-- /table:{name} -->\nafter\n"
    filled = make_tables.fill(document, results_folder)
    assert "\nold\n" not in filled
    assert filled.startswith("before\n")
    assert filled.endswith("after\n")
    assert make_tables.fill(filled, results_folder) == filled


def test_the_serve_table_gives_ranges_and_divides_within_a_run() -> None:
    table = cpu_tables.serve_table(results())
    base = "300 to 600 tok/s, TTFT 300 to 600 ms, TPOT 300 to 600 ms"
    adapters = "250 to 400 tok/s, TTFT 250 to 400 ms, TPOT 250 to 400 ms"
    assert f"| ours 1 | {base} | {adapters} | 1.20 to 1.50x |" in table
    assert "| theirs 1 | 200 to 400 tok/s, TTFT 200 to 400 ms, TPOT 200 to 400 ms | - | - |" in table
    note = cpu_tables.machine_note(results())
    assert note.startswith("Smallest and largest of 10 runs in 2 measurements, 2026-01-02, on 2 cores of CPU")


def test_a_measurement_is_added_to_those_before_it(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    assert cpu_serve.measurements_in(out) == []
    out.write_text(json.dumps(results()))
    assert cpu_serve.measurements_in(out) == results()["measurements"]
    out.write_text(json.dumps({"something": "else"}))
    with pytest.raises(SystemExit, match="holds no measurements"):
        cpu_serve.measurements_in(out)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("no markers", "no <!-- table:NAME -->"),
        ("<!-- table:nonsense -->\n<!-- /table:nonsense -->", "no table 'nonsense'"),
        ("<!-- table:cpu-serve -->\n", "has no <!-- /table:NAME -->"),
    ],
)
def test_a_document_that_cannot_be_filled_says_why(document: str, reason: str, results_folder: Path) -> None:
    with pytest.raises(make_tables.TableError, match=reason):
        make_tables.fill(document, results_folder)


def test_a_missing_result_file_is_named(tmp_path: Path) -> None:
    document = "<!-- table:cpu-serve -->\n<!-- /table:cpu-serve -->\n"
    with pytest.raises(make_tables.TableError, match=make_tables.SERVE):
        make_tables.fill(document, tmp_path)


def test_a_suite_not_measured_is_named() -> None:
    without = {key: value for key, value in measurement(1.0, 250.0).items() if key != "bystanders"}
    with pytest.raises(make_tables.TableError, match="bystanders"):
        cpu_tables.bystanders_table({"measurements": [without]})


@pytest.mark.slow
def test_cpu_lora_workers_are_measured_against_torch(tmp_path: Path) -> None:
    out = tmp_path / "assist.json"
    threads = torch.get_num_threads()
    try:
        assist.main(["--tiny", "--workers", "1", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    found = json.loads(out.read_text())
    assert found["workers"] == 1
    for dtype in ("bfloat16", "float32"):
        assert 0 < found[dtype]["round_trip_us"]["p50"] <= found[dtype]["round_trip_us"]["p99"]
        [row] = found[dtype]["products"]
        assert (row["tokens"], row["rank"]) == (16, 8)
        assert row["speedup"] == pytest.approx(row["torch_us"]["p50"] / row["workers_us"]["p50"], abs=0.05)


@pytest.mark.slow
def test_engines_are_measured_beside_busy_programs(tmp_path: Path) -> None:
    tiny.save_model(tmp_path / "base")
    out = tmp_path / "shared_cpu.json"
    threads = torch.get_num_threads()
    options = ["--repeats", "1", "--output-tokens", "4", "--limit-s", "20"]
    try:
        shared_cpu.main(["--model", str(tmp_path / "base"), "--out", str(out), *options])
    finally:
        torch.set_num_threads(threads)
    found = json.loads(out.read_text())
    assert len(found["load_before"]) == 3
    for name in ("alone", "one_busy_program_per_core"):
        speeds = found[name]["tokens_per_s"]
        assert speeds.keys() == {"all threads", "one thread", "automatic"}
        assert found[name]["automatic_over_one_thread"] == pytest.approx(
            speeds["automatic"] / speeds["one thread"], abs=0.01
        )
        assert found[name]["runs"]["one thread"][0]["threads_at_end"] == 1


@pytest.mark.slow
def test_cold_starts_are_measured_by_policy(tmp_path: Path) -> None:
    out = tmp_path / "gpu_cold.json"
    requests = [
        WorkloadRequest(arrival_s=0.02 * i, prompt_tokens=5, output_tokens=3, adapter=0) for i in range(6)
    ]
    write_workload(tmp_path / "poisson-9rps-30s.jsonl", requests)
    gpu_cold.main(
        ["idle", "large", "burst", "setups", "--tiny", "--workloads", str(tmp_path), "--out", str(out)]
    )
    found = {name: section["results"] for name, section in json.loads(out.read_text()).items()}
    assert found["idle"].keys() == {"cached", "on-demand", "overlap"}
    assert found["idle"]["overlap"].keys() == {"disk", "ready"}
    assert found["setups"]["S3"]["policies"].keys() == {"cached", "on-demand", "overlap"}


def test_setups_keep_the_arrivals_and_change_the_rate(tmp_path: Path) -> None:
    requests = [
        WorkloadRequest(arrival_s=float(i), prompt_tokens=5, output_tokens=3, adapter=0) for i in range(201)
    ]
    write_workload(tmp_path / "poisson-9rps-30s.jsonl", requests)
    setting = replace(gpu_cold.TINY, workloads=tmp_path)
    slower = gpu_cold.requests_of(setting, gpu_cold.Setup(name="S2", rank=64, requests_per_s=6))
    assert [request.arrival_s for request in slower] == [1.5 * i for i in range(200)]


def test_what_needs_a_gpu_is_not_tried_on_a_cpu() -> None:
    with pytest.raises(SystemExit):
        gpu_cold.main(["signal", "--tiny"])


def test_a_long_queue_is_measured_beside_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_queue, "STEP_WAITING", (0, 10, 40))
    monkeypatch.setattr(waiting_queue, "CANCEL_WAITING", (10, 40))
    monkeypatch.setattr(waiting_queue, "ROUNDS", 1)
    steps, cancels = waiting_queue.steps(), waiting_queue.cancels()
    assert list(steps["schedule_ms"]) == ["0", "10", "40"]
    assert list(cancels["cancel_us"]) == ["10", "40"]
    assert steps["ratio"] > 0 < cancels["ratio"]


def test_the_answers_of_structured_output_are_followed(tmp_path: Path) -> None:
    vocabulary = structured_output.Vocabulary(2048)
    vocabulary.write(tmp_path / "tokenizer.json")
    ours = structured_output.OfLlguidance(vocabulary, tmp_path)
    for kind, text, answer in structured_output.CASES.values():
        ids = vocabulary.ids(answer)
        assert b"".join(vocabulary.tokens[each] for each in ids) == answer.encode()
        measured = structured_output._one_round(ours, kind, text, ids)
        assert min(measured.values()) >= 0 < measured["mask_us"]


def test_steps_are_measured_with_the_tables_that_a_context_needs() -> None:
    found = measure_tables("cpu", num_requests=3, contexts=(20, 50), rounds=1)
    assert [(row["context"], row["blocks_each"]) for row in found] == [(20, 2), (50, 4)]
    assert all(row["step_ms"] > 0 for row in found)


def test_the_engine_of_one_context_is_gone_before_the_next_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref[object]] = []

    def build(*args: Any) -> Engine:
        assert [part() for part in built] == [None] * len(built)
        engine = build_random_engine(*args)
        executor = engine._executor
        assert isinstance(executor, TorchExecutor)
        built.extend(map(weakref.ref, (engine, executor, executor._decoder, executor._caches[0].k)))
        # Parts of an engine refer to each other: it does not go with the last name for it.
        engine.itself = engine  # type: ignore[attr-defined]
        return engine

    monkeypatch.setattr(table_steps, "build_random_engine", build)
    gc.disable()
    try:
        measure_tables("cpu", num_requests=2, contexts=(20, 30), rounds=1)
    finally:
        gc.enable()
    assert len(built) == 8
    assert [part() for part in built] == [None] * 8


def test_a_start_is_told_by_phase_up_to_ready_and_beyond(tmp_path: Path) -> None:
    checkpoint = HttpCheckpoint(root=tmp_path, shape="tiny", num_adapters=2, rank=4)
    checkpoint.ensure()
    found = gpu_start.measure_engine(checkpoint.base, checkpoint.adapters, "cpu", time.time())
    names = [phase["phase"] for phase in found["phases"]]
    assert names.index("reading weights") < names.index("capturing graphs") < names.index("first token")
    assert 0 < found["ready_s"] <= found["total_s"]
    assert found["graphs_required"] == 0, "a CPU has no graphs"
    found["phases"][-1]["kernels_compiled"] = 1
    starts = [{"cache": cache} | found for cache in ("empty", "warm")]
    servers = [{"ready_s": 21.34, "said": "20 s: all"}, {"ready_s": 9.86, "said": "9 s: all"}]
    table = gpu_tables.start_table({"engine": starts, "server": servers})
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
    assert rows[0] == "phase"
    assert rows.index("**engine ready, in all**") == rows.index("capturing graphs") + 1
    assert "| **`loraplex serve` ready, in all** | **21.3 s** | **9.9 s** |\n" in table
    assert table.endswith("| phases that `loraplex serve` reports | 20 s: all | 9 s: all |\n")
    assert table.count("1 kernel compiled") == 2
