from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import typer
from adapter_factory import SHAPE, encode, lora_name, make_config, make_tensors, write_adapter
from fake_hub import fake_hub
from registry_writer import make_spec
from typer.testing import CliRunner

from loraplex.adapters.peft_reader import inspect_adapter
from loraplex.adapters.registry import AdapterRegistry
from loraplex.adapters.spec import CONFIG_FILE
from loraplex.cli.adapter import _as_json, app, format_layers, run_check
from loraplex.cli.sizes import format_size
from loraplex.core.errors import ModelError
from loraplex.core.shape import ModelShape
from loraplex.engine.adapter_loader import resident_bytes


def load_shape(model: str) -> ModelShape:
    if model != "base":
        raise ModelError(f"there is no model {model}")
    return SHAPE


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_check_prints_all_about_a_servable_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(tmp_path, make_config(lora_dropout=0.1))
    assert run_check(tmp_path, "base", as_json=False, load_shape=load_shape) == 0
    output = capsys.readouterr().out
    for text in (
        "lora_alpha",
        "dropout is off",
        "q_proj",
        "0-3",
        "Total bytes in the file: 7,168",
        "Content hash: ",
    ):
        assert text in output


def test_a_check_says_what_serving_takes_beside_what_is_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file may be in another dtype than the engine computes in."""
    write_adapter(tmp_path)
    run_check(tmp_path, "base", as_json=False, load_shape=load_shape)
    run_check(tmp_path, "base", as_json=True, load_shape=load_shape)
    lines, _, rest = capsys.readouterr().out.partition("{")
    found = json.loads("{" + rest)["memory_bytes"]
    spec = inspect_adapter(tmp_path, SHAPE).spec
    assert spec is not None
    for dtype, size in found.items():
        assert size == resident_bytes(spec, SHAPE, getattr(torch, dtype)), "as the engine counts it"
    whole, half = format_size(found["float32"]), format_size(found["bfloat16"])
    words = f"In memory when served: {whole} in float32 (default on a CPU), {half} in bfloat16 or float16"
    assert words in lines


def test_the_verdict_of_a_check_is_its_first_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(tmp_path / "good")
    run_check(tmp_path / "good", "base", as_json=False, load_shape=load_shape)
    first, *details = capsys.readouterr().out.splitlines()
    assert first == f"Servable: {tmp_path / 'good'} (rank 4, 8 modules, 7.0 KiB on disk)"
    assert details[0] == ""

    write_adapter(tmp_path / "bad", make_config(use_dora=True))
    run_check(tmp_path / "bad", "base", as_json=False, load_shape=load_shape)
    first, reason, *_ = capsys.readouterr().out.splitlines()
    assert first == f"Refused for 1 reason: {tmp_path / 'bad'}"
    assert reason.startswith("- adapter_config.json: use_dora = true")


def test_check_warns_of_an_adapter_of_another_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(tmp_path, make_config(base_model_name_or_path="some/other"))
    assert run_check(tmp_path, "base", as_json=False, load_shape=load_shape) == 0
    verdict, warning, *_ = capsys.readouterr().out.splitlines()
    assert verdict.startswith("Servable: ")
    assert warning.startswith("Warning: trained on 'some/other'")
    assert run_check(tmp_path, "base", as_json=True, load_shape=load_shape) == 0
    [warning] = json.loads(capsys.readouterr().out)["warnings"]
    assert "not on 'base'" in warning


def test_check_prints_every_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(tmp_path, make_config(use_dora=True, r=8, **{"[bold]\x1b[2J": 1}))
    assert run_check(tmp_path, "base", as_json=False, load_shape=load_shape) == 1
    output = capsys.readouterr().out
    for text in ("Refused for 3 reasons: ", "use_dora", "has rank 4", "[bold]"):
        assert text in output.replace("\n", " ")
    assert "\x1b[2J" not in output


def test_check_as_json_groups_layers_that_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    tensors = make_tensors()
    for side, size in (("A", (2, 32)), ("B", (32, 2))):
        tensors[lora_name(1, "q_proj", side)] = encode(np.ones(size), "F16")
    write_adapter(tmp_path, make_config(rank_pattern={"layers.1.self_attn.q_proj": 2}), tensors)
    assert run_check(tmp_path, "base", as_json=True, load_shape=load_shape) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["servable"]
    assert len(report["version"]) == 64
    assert report["refused"] == []
    assert report["modules"] == [
        {"module": "q_proj", "layers": [0, 2, 3], "rank": 4, "scale": 2.0, "num_bytes": 3 * 1024},
        {"module": "q_proj", "layers": [1], "rank": 2, "scale": 4.0, "num_bytes": 256},
        {"module": "v_proj", "layers": [0, 1, 2, 3], "rank": 4, "scale": 2.0, "num_bytes": 4 * 768},
    ]
    assert report["num_bytes"] == sum(group["num_bytes"] for group in report["modules"])


def test_check_as_json_names_the_refused_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(tmp_path, make_config(use_dora=True, bias="all"))
    assert run_check(tmp_path, "base", as_json=True, load_shape=load_shape) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["servable"]
    assert report["version"] is None
    assert [(each["kind"], each["field"]) for each in report["refused"]] == [
        ("AdapterFormatError", "bias"),
        ("AdapterFormatError", "use_dora"),
    ]


def test_check_as_json_has_values_whole_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {f"key{number}": [number] for number in range(100)}
    write_adapter(tmp_path, make_config(runtime_config=long, revision=[[[[4]]]]))
    assert run_check(tmp_path, "base", as_json=True, load_shape=load_shape) == 0
    report = json.loads(capsys.readouterr().out)
    values = {each["field"]: each["value"] for each in (*report["honoured"], *report["no_effect"])}
    assert values["runtime_config"] == long
    assert (values["r"], values["target_modules"]) == (4, ["q_proj", "v_proj"])
    assert values["revision"] == [[[[4]]]]


def test_a_value_that_cannot_be_written_as_json_is_described() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert _as_json(deep) == "nested too deeply to be shown"
    while deep:  # taken apart here: Python's own way to free it is as deep
        deep = deep.pop()


def test_check_with_an_unknown_model_is_no_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught:
        run_check(tmp_path, "nothing", as_json=False, load_shape=load_shape)
    assert caught.value.exit_code == 1
    assert "there is no model nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "exit_code", "words"),
    [
        ("", 0, "Servable: "),
        (CONFIG_FILE, 1, "not that of a whole model"),
        ("all", 1, "no such repository"),
    ],
)
def test_check_fetches_an_adapter_of_the_hub(
    tmp_path: Path, missing: str, exit_code: int, words: str
) -> None:
    tiny.save_model(tmp_path / "model")
    tiny.save_adapter(tmp_path / "adapter", tiny.make_model(), rank=4)
    files = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    files.pop(missing, None)
    with fake_hub(tmp_path / "hf-home") as hub:
        if missing != "all":
            hub.push("org/it", files)
        command = [sys.executable, "-m", "loraplex.cli.main", "adapter", "check", "org/it", "--model"]
        done = subprocess.run(
            [*command, str(tmp_path / "model")],
            env=hub.environment(COLUMNS="500"),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == exit_code, done.stderr
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_check_without_model_is_a_usage_error_and_without_folder_an_error(tmp_path: Path) -> None:
    assert run("check", str(tmp_path)).exit_code == 2
    assert run("check", str(tmp_path / "none"), "--model", "base").exit_code == 1


@pytest.mark.parametrize(
    ("layers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2, 5"), ((0, 2, 4, 5), "0, 2, 4-5")]
)
def test_layers_are_shown_as_ranges(layers: tuple[int, ...], text: str) -> None:
    assert format_layers(layers) == text


@contextmanager
def serving(status: int, body: bytes, path: str = "/v1/adapters") -> Iterator[tuple[str, list[str | None]]]:
    """A server that gives one answer to all; yields its URL and the Authorization headers it got."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(status if self.path == path else 500)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ROW = {
    "name": "sql",
    "version": "c0ffee" * 10,
    "rank": 16,
    "bytes": 3_400_000,
    "tier": "host",
    "in_flight": 2,
    "hits": 7,
    "loads": 1,
    "path": "/a/sql",
}


def test_list_shows_the_adapters_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with serving(200, json.dumps({"object": "list", "data": [ROW]}).encode()) as (url, seen):
        result = run("list", "--base-url", url, "--api-key", "k")
        as_json = run("list", "--base-url", f"{url}/v1/", "--json")
    assert result.exit_code == 0
    assert seen == ["Bearer k", None]
    for text in ("sql", "c0ffeec0", "3.2 MiB", "host", "/a/sql"):
        assert text in result.output
    assert json.loads(as_json.output) == [ROW]


def test_list_does_not_show_zeros_for_what_servers_do_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    row = ROW | {"bytes": 0, "hits": 0}
    with serving(200, json.dumps({"object": "list", "data": [row]}).encode()) as (url, _):
        result = run("list", "--base-url", url)
        as_json = run("list", "--base-url", url, "--json")
    assert result.output.splitlines()[-1].split()[3:7] == ["-", "host", "2", "-"]
    assert json.loads(as_json.output) == [row]
    hidden = ROW | dict.fromkeys(("in_flight", "hits", "loads"))
    with serving(200, json.dumps({"object": "list", "data": [hidden]}).encode()) as (url, _):
        shown = run("list", "--base-url", url).output.splitlines()[-1].split()
    assert shown[5:9] == ["host", "-", "-", "-"]


@pytest.mark.parametrize(
    ("status", "message", "says"),
    [
        (400, "it is loaded; set load_inplace to replace it", "it is loaded; give --replace to replace it"),
        (400, "canary_share is 2, and must be below 1", "--canary-share is 2, and must be below 1"),
        (403, "'/etc' is outside the folders", "refuses this (status 403): '/etc' is outside the folders"),
    ],
)
def test_a_refusal_names_options_of_the_command(status: int, message: str, says: str) -> None:
    body = json.dumps({"error": {"message": message}}).encode()
    with serving(status, body, "/v1/load_lora_adapter") as (url, _):
        result = run("load", "sql", "/etc", "--base-url", url)
    assert result.exit_code == 1
    assert says in str(result.exception)


def test_a_list_is_one_line_an_adapter_at_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        ROW | {"path": "/home/somebody/models/adapters/with/a/long/path/sql", "hits": 123_456},
        ROW | {"name": "customer-support", "bytes": 120 * 2**20, "tier": "disk", "rank": 256, "path": "/a"},
    ]
    with serving(200, json.dumps({"data": rows}).encode()) as (url, _):
        lines = run("list", "--base-url", url).output.splitlines()
    assert lines[0].split() == ["name", "version", "rank", "memory", "tier", "in", "flight", "hits", "loads"]
    assert lines[1].split() == ["sql", "c0ffeec0", "16", "3.2", "MiB", "host", "2", "123,456", "1"]
    assert lines[2].split() == ["customer-support", "c0ffeec0", "256", "120", "MiB", "disk", "2", "7", "1"]
    assert lines[3:] == ["Not shown: path; see a wider terminal, or --json."]
    assert max(map(len, lines)) <= 80


def test_a_list_shows_what_it_does_not_understand_as_it_came() -> None:
    rows = [{"name": "sql\x1b[2J", "rank": "many", "bytes": None}]
    with serving(200, json.dumps({"data": rows}).encode()) as (url, _):
        output = run("list", "--base-url", url).output
    assert "many" in output
    assert "\x1b" not in output


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b"", "wants an API key (status 401); give it with --api-key"),
        (404, b"", "is it a loraplex server with adapters?"),
        (503, b"", "answered with status 503"),
        (200, b"<html>", "did not answer with JSON"),
        (200, b'{"data": 3}', "something else than a list of adapters"),
    ],
)
def test_list_explains_a_server_that_does_not_answer_well(status: int, body: bytes, message: str) -> None:
    with serving(status, body) as (url, _):
        result = run("list", "--base-url", url)
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("http://127.0.0.1:9", "a\nsecret", "has characters that no key has"),
        ("http://127.0.0.1:9", "ключ", "has characters that no key has"),
        ("http://[::1", "k", "is no URL (Invalid IPv6 URL)"),
    ],
)
def test_a_key_or_url_that_cannot_be_sent_is_refused(url: str, key: str, message: str) -> None:
    result = run("list", "--base-url", url, "--api-key", key)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "secret" not in result.stderr


def test_versions_of_a_misspelt_adapter_name_similar_ones() -> None:
    rows = [{"name": "sql"}, {"name": "poet"}]
    with serving(200, json.dumps({"data": rows}).encode()) as (url, _):
        result = run("versions", "sqll", "--base-url", url)
    assert "there is no adapter 'sqll'; did you mean sql?" in str(result.exception)


def test_list_explains_how_to_start_a_server() -> None:
    with serving(200, b"[]") as (url, _):
        pass
    result = run("list", "--base-url", url)
    assert result.exit_code == 1
    assert "start one with `loraplex serve`" in result.stderr
    assert run("list", "--base-url", "ftp://x").exit_code == 2


def test_list_reads_a_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with closing(AdapterRegistry(tmp_path, "base")) as registry:
        registry.put("sql", make_spec("v1"))
    result = run("list", "--state-dir", str(tmp_path))
    assert result.exit_code == 0
    for text in ("sql", "v1", "base", "/adapters/v1"):
        assert text in result.output


def test_list_explains_a_folder_without_registry(tmp_path: Path) -> None:
    result = run("list", "--state-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "no registry.sqlite3" in result.stderr


def test_list_of_nothing_says_so() -> None:
    with serving(200, b'{"data": []}') as (url, _):
        assert "no adapters" in run("list", "--base-url", url).output


def test_a_pipe_gets_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    path = "/home/somebody/models/adapters/with/a/very/long/path/to/an/adapter/named/sql"
    with serving(200, json.dumps({"data": [ROW | {"path": path}]}).encode()) as (url, _):
        lines = run("list", "--base-url", url).output.splitlines()
    assert len(lines) == 2
    assert lines[1].endswith(path)
