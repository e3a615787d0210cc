"""The HTTP comparison: real servers are started and loaded by a stand-in for vLLM's client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import http_compare
from benchmarks.http_checkpoint import HttpCheckpoint
from benchmarks.http_client import BenchClient, ClientFailedError, Lengths, Load, figures
from benchmarks.http_servers import Servers, shown_command

# Answers `--version`, and to `bench serve` sends one request for each model named and writes a result file as
# `vllm bench serve` does. It fails where the server does.
STAND_IN = """#!{python}
import json, sys, urllib.request
from pathlib import Path
if sys.argv[1:] == ["--version"]:
    print("9.9.9")
    raise SystemExit
def after(flag):
    return sys.argv[sys.argv.index(flag) + 1]
models = sys.argv[sys.argv.index("--lora-modules") + 1:] if "--lora-modules" in sys.argv else ["base"]
for model in models:
    body = {{"model": model, "prompt": "w5 w6 w7", "max_tokens": 2, "ignore_eos": True}}
    url, headers = after("--base-url") + after("--endpoint"), {{"Content-Type": "application/json"}}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 2
count = int(after("--num-prompts"))
result = {{"completed": count, "failed": 0, "duration": 1.0, "output_throughput": 100.0 * len(models)}}
for name in ("ttft", "tpot", "itl", "e2el"):
    for kind in ("mean", "median", "p95", "p99"):
        result[f"{{kind}}_{{name}}_ms"] = 5.0
Path(after("--result-dir"), after("--result-filename")).write_text(json.dumps(result))
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    program = tmp_path / "vllm"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    return program


def compare(tmp_path: Path, vllm: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    status = http_compare.main(
        [
            *arguments,
            *("--vllm", str(vllm), "--work-dir", str(tmp_path / "work"), "--out", str(out)),
            *("--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--num-adapters", "2"),
            *("--rank", "4", "--steady-requests", "6", "--saturated-requests", "8"),
        ]
    )
    assert status == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_server_is_measured_run_by_run_and_missing_runs_are_added(tmp_path: Path, vllm: Path) -> None:
    first = compare(tmp_path, vllm, "loraplex", "--adapters", "0,2")["loraplex"]
    cells = [(run["adapters"], run["load"], run["output_tokens_per_s"]) for run in first["runs"]]
    assert cells == [(0, "steady", 100), (0, "saturated", 100), (2, "steady", 200), (2, "saturated", 200)]
    assert len({run["seed"] for run in first["runs"]}) == 4
    assert len(first["start_s"]) == 1
    assert first["versions"]["vllm"] == "9.9.9"
    assert str(tmp_path) not in json.dumps(first)
    second = compare(tmp_path, vllm, "loraplex", "--adapters", "0,1,2", "--missing")["loraplex"]
    assert second["runs"][:4] == first["runs"]
    assert [(run["adapters"], run["load"]) for run in second["runs"][4:]] == [(1, "steady"), (1, "saturated")]


def test_starts_are_measured_with_empty_and_used_caches(tmp_path: Path, vllm: Path) -> None:
    found = compare(tmp_path, vllm, "starts", "--adapters", "0,2")["starts"]
    places = [(run["caches"], run["place"]) for run in found["runs"]]
    assert places == [(caches, place) for caches in ("empty", "used") for place in (1, 2, 3)]
    assert len(found["start_s"]) == 2


def test_no_step_begins_that_the_time_does_not_allow(
    tmp_path: Path, vllm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = http_compare.main(
        [
            *("loraplex", "--seconds", "1", "--vllm", str(vllm), "--work-dir", str(tmp_path / "work")),
            *("--out", str(tmp_path / "out.json"), "--shape", "tiny", "--num-adapters", "1", "--rank", "4"),
            *("--adapters", "0"),
        ]
    )
    assert status == 0
    assert "go on with --missing" in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()


def test_a_section_measured_with_other_settings_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    for rank in (8, 8, 16):
        file = http_compare.ResultFile(out, {"rank": rank}, {"vllm": "1"})
        file.open_section("vllm")["runs"].append({"adapters": 0})
        file.save()
        found = json.loads(out.read_text())["vllm"]
    assert (found["parameters"], len(found["runs"])) == ({"rank": 16}, 1)


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    checkpoint = HttpCheckpoint(root=tmp_path / "ckpt", shape="llama-2-7b", num_adapters=2, rank=64)
    return Servers(checkpoint=checkpoint, state_dir=tmp_path / "state", vllm_site=tmp_path / "site")


def test_vllm_is_told_what_its_load_needs(servers: Servers, tmp_path: Path) -> None:
    command = servers.command("vllm-lora")
    assert shown_command(command) == (
        "vllm serve base --served-model-name base --port {port} --dtype bfloat16 --max-model-len 4096 "
        "--gpu-memory-utilization 0.85 --no-enable-prefix-caching --enable-lora --max-loras 64 "
        "--max-lora-rank 64 --max-cpu-loras 128 --lora-target-modules qkv_proj --lora-modules ..."
    )
    assert command.args[-1] == f"lora-0001={tmp_path / 'ckpt/adapters/lora-0001'}"
    assert command.env["PYTHONPATH"].startswith(str(tmp_path / "site"))
    assert "--enable-lora" not in servers.command("vllm").args


def test_a_home_of_its_own_holds_every_cache(servers: Servers, tmp_path: Path) -> None:
    env = servers.command("loraplex", home=tmp_path / "home").env
    assert {name for name, value in env.items() if value.startswith(str(tmp_path / "home"))} >= {
        "HOME", "LORAPLEX_CACHE", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH",
    }  # fmt: skip
    assert "HOME" not in servers.command("loraplex").env


def test_failed_requests_are_counted_whatever_the_client_says() -> None:
    found = figures({"completed": 290, "output_throughput": 1.23456}, num_requests=300)
    assert found == {"completed": 290, "failed": 10, "output_tokens_per_s": 1.235}


def test_a_client_that_fails_is_reported_with_its_output(tmp_path: Path) -> None:
    client = BenchClient(
        program=(sys.executable, "-c", "raise SystemExit('no such server')"),
        tokenizer=tmp_path,
        lengths=Lengths(),
        scratch=tmp_path,
        env={},
    )
    with pytest.raises(ClientFailedError, match="no such server"):
        client.run("http://127.0.0.1:1", Load(name="x", num_requests=1, concurrency=1), [], seed=1)
