"""The HTTP comparison: real servers are started and loaded by a stand-in for vLLM's client."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import http_compare, sources
from benchmarks.http_checkpoint import HttpCheckpoint
from benchmarks.http_client import VLLM, BenchClient, ClientFailedError, Load, figures
from benchmarks.http_compare import Comparison, OutOfTimeError, ResultFile
from benchmarks.http_plan import Plan, prompt_load
from benchmarks.http_servers import Servers, shown_command
from benchmarks.servers import ServerCommand

# Answers `--help`, and to `bench serve` sends one request for each model named and writes a
# result file as `vllm bench serve` does. It fails where the server does.
STAND_IN = """
import json, sys, urllib.request
from pathlib import Path
if sys.argv[-1] == "--help":
    raise SystemExit
def after(flag):
    return sys.argv[sys.argv.index(flag) + 1]
models = sys.argv[sys.argv.index("--lora-modules") + 1:] if "--lora-modules" in sys.argv else ["base"]
for model in models:
    body = {"model": model, "prompt": "w5 w6 w7", "max_tokens": 2, "ignore_eos": True}
    url, headers = after("--base-url") + after("--endpoint"), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 2
count = int(after("--num-prompts"))
result = {"completed": count, "failed": 0, "duration": 1.0, "output_throughput": 100.0 * len(models)}
for name in ("ttft", "tpot", "itl", "e2el"):
    for kind in ("mean", "median", "p95", "p99"):
        result[f"{kind}_{name}_ms"] = 5.0
Path(after("--result-dir"), after("--result-filename")).write_text(json.dumps(result))
"""


# A server that is healthy at once and answers every request, in place of those that take long to start.
SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        body = json.dumps({"usage": {"completion_tokens": 2}}).encode()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST = answer
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@dataclass(frozen=True, kw_only=True)
class StandIns(Servers):
    """The servers of a comparison, each of them the program above; `homes` collects what they were given."""

    homes: list[Path | None] = field(default_factory=list)

    def command(self, name: str, *, home: Path | None = None) -> ServerCommand:
        self.homes.append(home)
        return ServerCommand(args=(sys.executable, "-c", SERVER, "{port}"))


@pytest.fixture
def vllm_site(tmp_path: Path) -> Path:
    return write_module(tmp_path / "site", STAND_IN)


def write_module(site: Path, program: str) -> Path:
    """Write a folder in which `program` is vLLM's command line."""
    module = site.joinpath(*VLLM.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    module.write_text(program)
    metadata = site / "vllm-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: vllm\nVersion: 9.9.9\n")
    return site


@pytest.fixture
def stand_ins(tmp_path: Path, vllm_site: Path) -> StandIns:
    checkpoint = HttpCheckpoint(root=tmp_path / "ckpt", shape="tiny", num_adapters=2, rank=4)
    return StandIns(checkpoint=checkpoint, state_dir=tmp_path / "state", vllm_site=vllm_site)


def compare(
    servers: Servers, section: str, *, adapters: tuple[int, ...], missing: bool = False, seconds: float = 1e6
) -> dict[str, Any]:
    """Run one section as `main` does, and return what the result file then holds of it."""
    work_dir = servers.state_dir.parent
    out = work_dir / "out.json"
    plan = Plan(
        adapters=adapters,
        num_adapters=servers.checkpoint.num_adapters,
        loads=(
            Load(name="steady", num_requests=6, requests_per_s=20.0),
            Load(name="saturated", num_requests=8, concurrency=4),
        ),
        selected=("steady", "saturated"),
    )
    with BenchClient(
        python=servers.vllm_python,
        tokenizer=servers.checkpoint.base,
        scratch=work_dir,
        env=servers.vllm_env,
    ) as client:
        Comparison(
            servers=servers,
            client=client,
            plan=plan,
            result=ResultFile(out, {"machine": "m", "versions": {}, "parameters": {}}),
            work_dir=work_dir,
            only_missing=missing,
            deadline_s=time.monotonic() + seconds,
        ).run_section(section)
    found: dict[str, Any] = json.loads(out.read_text())[section]
    return found


def cells(section: dict[str, Any]) -> list[tuple[int, str]]:
    return [(run["adapters"], run["load"]) for run in section["runs"]]


@pytest.mark.slow
def test_our_server_is_measured_run_by_run(tmp_path: Path, vllm_site: Path) -> None:
    out = tmp_path / "out.json"
    status = http_compare.main(
        [
            *("loraplex", "--adapters", "0,2", "--num-adapters", "2", "--rank", "4", "--shape", "tiny"),
            *("--device", "cpu", "--dtype", "float32", "--vllm-site", str(vllm_site), "--out", str(out)),
            *("--work-dir", str(tmp_path / "work"), "--steady-requests", "6", "--saturated-requests", "8"),
            *("--prompt-tokens", "9", "--loads", "steady,saturated,prompt-9"),
        ]
    )
    assert status == 0
    found = json.loads(out.read_text())["loraplex tiny"]
    loads = ("steady", "saturated", "prompt-9")
    assert cells(found) == [(adapters, load) for adapters in (0, 2) for load in loads]
    assert [run["output_tokens_per_s"] for run in found["runs"]] == [100] * 3 + [200] * 3
    assert len({run["seed"] for run in found["runs"]}) == 6
    assert list(found["parameters"]["loads"]) == ["steady", "high-rate", "saturated", "prompt-9"]
    assert found["versions"]["vllm"] == "9.9.9"
    assert sources.changed_since(found, http_compare.FILE, "loraplex") == []
    assert str(tmp_path) not in json.dumps(found)


def test_missing_runs_are_added_and_others_repeated_with_new_seeds(stand_ins: StandIns) -> None:
    first = compare(stand_ins, "vllm-lora", adapters=(0, 2))
    same = compare(stand_ins, "vllm-lora", adapters=(0, 2), missing=True)
    assert same == first
    assert len(stand_ins.homes) == 1, "no server is started where nothing is missing"
    more = compare(stand_ins, "vllm-lora", adapters=(0, 1, 2), missing=True)
    assert cells(more) == [*cells(first), (1, "steady"), (1, "saturated")]
    again = compare(stand_ins, "vllm-lora", adapters=(1,))
    assert cells(again) == [*cells(more), (1, "steady"), (1, "saturated")]
    assert len({run["seed"] for run in again["runs"]}) == len(again["runs"])
    assert len(again["start_s"]) == 3


def test_vllm_without_lora_is_asked_for_the_base_model_alone(stand_ins: StandIns) -> None:
    assert cells(compare(stand_ins, "vllm", adapters=(0, 2))) == [(0, "steady"), (0, "saturated")]


def test_loads_other_than_the_first_two_have_no_adapters_or_all_and_vllm_none_with_lora() -> None:
    loads = [Load(name=name, num_requests=1, concurrency=1) for name in ("steady", "high-rate", "saturated")]
    everything = Plan(
        adapters=(0, 8, 100),
        num_adapters=100,
        loads=(*loads, prompt_load(2048, 16)),
        selected=("steady", "high-rate", "prompt-2048"),
    )

    def chosen(server: str) -> list[tuple[int, str]]:
        return [(adapters, load.name) for adapters, load in everything.cells(server)]

    base = [(0, "steady"), (0, "high-rate"), (0, "prompt-2048")]
    most = [(100, name) for _, name in base]
    assert chosen("loraplex") == [*base, (8, "steady"), *most]
    assert chosen("vllm") == base
    assert chosen("vllm-lora") == [(0, "steady"), (8, "steady"), (100, "steady")]


def test_prompts_of_a_load_have_its_length_and_short_answers() -> None:
    assert prompt_load(8000, 16).args == (
        *("--request-rate", "inf", "--num-prompts", "16", "--max-concurrency", "1"),
        *("--random-input-len", "8000", "--random-output-len", "8", "--random-range-ratio", "0.0"),
    )


def test_an_unknown_load_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        http_compare.main(["loraplex", "--loads", "steady,prompt-1"])
    assert (
        "no load 'prompt-1'; there are steady, high-rate, saturated, prompt-2048" in capsys.readouterr().err
    )


def test_starts_are_measured_with_empty_and_used_caches(stand_ins: StandIns, tmp_path: Path) -> None:
    left_over = tmp_path / "home" / "left over"
    left_over.mkdir(parents=True)
    found = compare(stand_ins, "starts", adapters=(0, 2))
    places = [(run["caches"], run["place"]) for run in found["runs"]]
    assert places == [(caches, place) for caches in ("empty", "used") for place in (1, 2, 3)]
    assert len(found["start_s"]) == 2
    assert stand_ins.homes == [tmp_path / "home"] * 2
    assert not left_over.exists()
    assert {run["adapters"] for run in found["runs"]} == {2}


def test_no_step_begins_that_the_time_does_not_allow(stand_ins: StandIns) -> None:
    with pytest.raises(OutOfTimeError):
        compare(stand_ins, "loraplex", adapters=(0,), seconds=1.0)
    assert not (stand_ins.state_dir.parent / "out.json").exists(), "no server was started"


def test_a_section_measured_with_other_settings_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    for rank in (8, 8, 16):
        file = ResultFile(out, {"parameters": {"rank": rank}})
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
        "vllm serve base --served-model-name base --port {port} --dtype bfloat16 --max-model-len 8192 "
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys\nif sys.argv[-1] != '--help': raise SystemExit('no such server')", "no such server"),
        ("raise ImportError('no such library')", "no such library"),
        ("import sys, time\nif sys.argv[-1] != '--help': time.sleep(600)", "more than 5 s"),
    ],
)
def test_a_client_that_fails_is_reported_with_its_output(tmp_path: Path, program: str, message: str) -> None:
    site = write_module(tmp_path / "site", program)
    with (
        BenchClient(
            python=sys.executable,
            tokenizer=tmp_path,
            scratch=tmp_path,
            env={"PYTHONPATH": str(site)},
            timeout_s=5.0,
        ) as client,
        pytest.raises(ClientFailedError, match=message),
    ):
        client.run("http://127.0.0.1:1", Load(name="x", num_requests=1, concurrency=1), [], seed=1)
