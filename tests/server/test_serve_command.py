"""`loraplex serve` as a user runs it: a process, a port, signals and exit codes."""

from __future__ import annotations

import asyncio
import io
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
from fake_hub import fake_hub
from rich.console import Console
from server_process import COMMAND, run_command, serving, wait_until
from serving_fakes import hf_tokenizer
from typer import BadParameter
from typer.main import get_command
from typer.testing import CliRunner

from loraplex.adapters.registry import AdapterRegistry, base_model_key
from loraplex.cli.main import app
from loraplex.cli.sizes import format_size, parse_size
from loraplex.engine import cpu_build
from loraplex.engine.cuda import host_memory
from loraplex.engine.options import EngineOptions
from loraplex.model.config import load_config
from loraplex.server import run
from loraplex.server.banner import Announcer
from loraplex.server.start_notes import context_notes


@pytest.mark.parametrize("command", [("serve",), ("fleet", "serve")])
@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            ("--max-loras", "4"),
            "--max-loras: it is an option of vLLM; leave it out: adapters take the memory",
        ),
        (
            ("--tensor-parallel-size=2",),
            "--tensor-parallel-size: it is an option of vLLM; give --tensor-parallel",
        ),
        (("--no-enable-prefix-caching",), "leave it out: what it switches off is always on"),
        (("--no-enable-log-requests",), "give --log-level warning"),
        (("--disable-log-requests",), "give --log-level warning"),
        (("--no-enforce-eager",), "leave it out: there is nothing to choose here"),
        (("--kv_cache_dtype", "fp8"), "--kv_cache_dtype: it is an option of vLLM; leave it out: keys and"),
        (("--speculative-config.method", "ngram"), "there is no speculative decoding"),
        (("-q", "awq"), "give a model that is not quantized"),
        (("--no-such",), "No such option"),
    ],
)
def test_an_option_of_vllm_is_told_what_it_is_here(
    command: tuple[str, ...], option: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(app, [*command, "--model", "m", *option], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert says in result.output


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    base = tiny.save_model(folder, vocab_size=400)
    hf_tokenizer().save_pretrained(folder)
    tiny.save_adapter(folder / "adapters" / "one", base, rank=4)
    tiny.save_adapter(folder / "more" / "two", base, rank=8, seed=2)
    broken = folder / "adapters" / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{}")
    return folder


def last_words(process: subprocess.Popen[str]) -> list[str]:
    """Return the lines that a server printed at its end, after its banner. A thread writes its log, which may
    come between them."""
    assert process.stdout is not None
    return [line for line in process.stdout.read().splitlines() if " INFO request: " not in line][-2:]


def test_a_server_serves_loads_remembers_and_ends_in_peace(model_folder: Path, tmp_path: Path) -> None:
    options = [
        "--adapters", str(model_folder / "adapters"), "--allow-adapter-dir", str(model_folder / "more"),
        "--state-dir", str(tmp_path), "--api-key", "secret",
    ]  # fmt: skip
    headers = {"Authorization": "Bearer secret"}
    with serving(model_folder, *options) as (process, url, said):
        [note] = [line for line in said.splitlines() if "'broken' is not served" in line]
        assert " WARNING " in note
        # It would take seconds to import and hundreds of MiB to hold; only the engine process needs it.
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            names = [model["id"] for model in client.get("/v1/models").json()["data"]]
            assert names == ["tiny", "one"]
            body = {"lora_name": "two", "lora_path": str(model_folder / "more" / "two")}
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
            texts = set()
            for model in ("tiny", "one", "two"):
                request = {"model": model, "prompt": "the dog", "temperature": 0, "ignore_eos": True}
                answer = client.post("/v1/completions", json=request).json()
                assert answer["usage"]["completion_tokens"] == 16
                texts.add(answer["choices"][0]["text"])
            assert len(texts) == 3
            tiers = {a["name"]: a["tier"] for a in client.get("/v1/adapters").json()["data"]}
            assert tiers == {"one": "host", "two": "host"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert last_words(process) == ["shutting down", "shut down"]

    with serving(model_folder, *options, "--kv-memory", "200000") as (process, url, said):
        assert process.stdout is not None
        process.stdout.close()  # as with `loraplex serve 2>&1 | head`: nobody reads further output
        models = httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in models] == ["tiny", "one", "two"]
        longest = models[0]["max_model_len"]
        assert longest < 512
        assert f"contexts of {longest} tokens" in said
        request = {"model": "one", "prompt": "the dog", "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=request, headers=headers, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_two_servers_on_one_state_folder_follow_each_other_and_lose_nothing(
    model_folder: Path, tmp_path: Path
) -> None:
    options = ["--allow-adapter-dir", str(model_folder), "--state-dir", str(tmp_path / "state")]

    def call(url: str, action: str, name: str, path: str | None = None) -> httpx.Response:
        body = {"lora_name": name} | ({"lora_path": path} if path else {})
        return httpx.post(f"{url}/v1/{action}_lora_adapter", json=body, timeout=60)

    def models(url: str) -> set[str]:
        return {model["id"] for model in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]}

    with serving(model_folder, *options) as (first, first_url, said):
        assert "another server" not in said
        assert call(first_url, "load", "bot", "adapters/one").status_code == 200
        with serving(model_folder, *options) as (second, second_url, said):
            assert f"another server (process {first.pid}) uses the state folder" in said
            assert models(second_url) == {"tiny", "bot"}
            assert call(second_url, "load", "mine", "more/two").status_code == 200
            wait_until(lambda: models(first_url) == {"tiny", "bot", "mine"}, "the first server follows")
            assert call(second_url, "unload", "bot").status_code == 200
            wait_until(lambda: models(first_url) == {"tiny", "mine"}, "the first server follows again")
            assert call(second_url, "load", "bot", "more/two").status_code == 200
            refused = call(first_url, "load", "mine", "adapters/one")
            assert "already loaded" in refused.json()["error"]["message"]
            (tmp_path / "state").rename(tmp_path / "lost")
            assert call(first_url, "load", "late", "adapters/one").status_code == 200
            assert call(second_url, "load", "later", "more/two").status_code == 200
            everything = {"tiny", "bot", "mine", "late", "later"}
            for url in (first_url, second_url):
                wait_until(lambda url=url: models(url) == everything, "both servers have all adapters")
            for process in (first, second):
                process.kill()
                process.wait()
    key = base_model_key(str(model_folder.resolve()), load_config(model_folder).shape)
    registry = AdapterRegistry(tmp_path / "state", key)
    assert not registry.other_servers
    assert set(registry.names()) == {"bot", "mine", "late", "later"}
    registry.close()


@pytest.mark.slow
def test_a_server_fetches_adapters_of_the_hub(model_folder: Path, tmp_path: Path) -> None:
    with fake_hub(tmp_path / "hf-home") as hub:
        hub.push("org/one", model_folder / "adapters" / "one")
        hub.push("org/two", model_folder / "more" / "two")
        given = ["--adapter", "one=org/one@main", "--state-dir", str(tmp_path)]
        body = {"lora_name": "two", "lora_path": "org/two"}
        options = [*given, "--allow-adapter-repo", "org/t*"]
        with serving(model_folder, *options, environment=hub.environment()) as (_, url, said):
            assert " WARNING " not in said
            closed = body | {"lora_path": "org/one"}
            assert httpx.post(f"{url}/v1/load_lora_adapter", json=closed, timeout=60).status_code == 403
            assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 200
            texts = set()
            for model in ("tiny", "one", "two"):
                request = {"model": model, "prompt": "the dog", "temperature": 0, "ignore_eos": True}
                answer = httpx.post(f"{url}/v1/completions", json=request, timeout=60).json()
                texts.add(answer["choices"][0]["text"])
            assert len(texts) == 3


@pytest.mark.parametrize(
    ("given", "exit_code", "words"),
    [
        (["org/one"], 2, "is not NAME=SOURCE"),
        (["one="], 2, "is not NAME=SOURCE"),
        (["a/.b=org/one"], 2, "not a valid adapter name"),
        (["one=org/one", "one=org/two"], 2, "given twice"),
        (["one=./nowhere"], 1, "there is no folder ./nowhere"),
    ],
)
def test_an_adapter_is_given_as_a_name_and_a_source(given: list[str], exit_code: int, words: str) -> None:
    options = [option for each in given for option in ("--adapter", each)]
    done = run_command("serve", "--model", "x", *options)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert words in done.stderr


@pytest.mark.slow
def test_a_server_does_not_start_without_an_adapter_that_is_given_by_itself(
    model_folder: Path, tmp_path: Path
) -> None:
    broken = model_folder / "adapters" / "broken"
    options = ["--model", str(model_folder), "--port", "0", "--state-dir", str(tmp_path)]
    done = subprocess.run(
        [*COMMAND, "serve", *options, "--adapter", f"one={broken}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: --adapter one={broken} cannot be served: ")


def test_a_signal_while_the_model_loads_is_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load_for_ever(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    monkeypatch.setattr(run, "_serve_until", load_for_ever)
    out = io.StringIO()
    run.serve(run.ServeOptions(engine=EngineOptions(model="x")), Announcer(console=Console(file=out)))
    assert out.getvalue().splitlines() == ["shutting down", "shut down"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_server_listens_to_it_ends_with_0(
    number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(run, "serve", lambda options: signal.raise_signal(number))
    done = CliRunner().invoke(app, ["serve", "--model", "x"])
    assert isinstance(done.exception, SystemExit | None), "it was not killed"
    assert done.exit_code == 0
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err == "shut down before the start\n"


def test_a_port_in_use_is_one_clear_line(tmp_path: Path, model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        start = [*COMMAND, "serve", "--model", str(model_folder), "--port", port]
        done = subprocess.run(
            [*start, "--state-dir", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 1
    [line] = done.stderr.strip().splitlines()
    assert port in line
    assert "--port" in line


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["serve"], 2, "the model is missing"),
        (["serve", "a", "--model", "b"], 2, "there are two models, a and b"),
        (["serve", "--model", "/does/not/exist", "--port", "0"], 1, "/does/not/exist"),
        (["--version"], 0, ""),
    ],
)
def test_mistakes_are_told_apart_by_exit_code(arguments: list[str], exit_code: int, words: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == exit_code
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-memory", "lots"], "512MiB"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "good", "--api-key", " "], "--api-key"),
        (["--admin-key", " "], "--admin-key"),
        (["--api-key", "k", "--tenants", "t.toml"], "loraplex tenant add"),
        (["--allowed-origins", "chat.example.com"], "is not an origin"),
        (["--allowed-hosts", "http://x"], "is not a host name"),
    ],
)
def test_options_that_cannot_be_are_refused(options: list[str], words: str) -> None:
    done = run_command("serve", "--model", "x", *options)
    assert done.returncode == 2
    assert words in done.stderr


def test_the_number_of_processes_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[run.ServeOptions] = []
    monkeypatch.setattr(run, "serve", seen.append)
    done = CliRunner().invoke(app, ["serve", "--model", "x", "--tensor-parallel", "2"])
    assert done.exit_code == 0
    assert seen[0].engine.tensor_parallel == 2
    assert CliRunner().invoke(app, ["serve", "--model", "x", "--tensor-parallel", "0"]).exit_code == 2


def test_the_grace_at_the_end_reaches_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[run.ServeOptions] = []
    monkeypatch.setattr(run, "serve", seen.append)
    for options in ([], ["--shutdown-grace", "0.5"]):
        assert CliRunner().invoke(app, ["serve", "--model", "x", *options]).exit_code == 0
    assert [options.shutdown_grace_s for options in seen] == [5.0, 0.5]
    assert CliRunner().invoke(app, ["serve", "--model", "x", "--shutdown-grace", "-1"]).exit_code == 2


def test_requests_may_fetch_from_the_hub_only_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[run.ServeOptions] = []
    monkeypatch.setattr(run, "serve", seen.append)
    for options in ([], ["--allow-adapter-repo", "a/*", "--allow-adapter-repo", "b/c"]):
        assert CliRunner().invoke(app, ["serve", "--model", "x", *options]).exit_code == 0
    assert [options.allow_adapter_repos for options in seen] == [(), ("a/*", "b/c")]


def test_names_origins_and_admin_keys_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[run.ServeOptions] = []
    monkeypatch.setattr(run, "serve", seen.append)
    hosts = ["--allowed-hosts", "API.example.com,*.lan", "--allowed-hosts", "box"]
    origins = ["--allowed-origins", "https://chat.example.com/, http://localhost:3000"]
    command = ["serve", "--model", "x", *hosts, *origins]
    done = CliRunner().invoke(app, command, env={"LORAPLEX_ADMIN_KEY": "root"})
    assert done.exit_code == 0, done.output
    [options] = seen
    assert options.allowed_hosts == ("api.example.com", "*.lan", "box")
    assert options.allowed_origins == ("https://chat.example.com", "http://localhost:3000")
    assert options.admin_keys == ("root",)


def all_commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command and group of commands."""
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from all_commands(command, (*path, name))


def test_the_names_of_options_are_whole_on_a_narrow_terminal() -> None:
    for command in all_commands(get_command(app)):
        done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
        names = {word for word in done.output.split() if word.startswith("--")}
        assert "--help" in names
        assert not any("…" in name for name in names), command


def test_flags_are_shown_without_a_value() -> None:
    commands = list(all_commands(get_command(app)))
    assert {(), ("serve",), ("bench", "engine", "decode")} < set(commands)
    for command in commands:
        done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
        assert "--help" in done.output
        assert "<bool>" not in done.output, command


def test_the_defaults_that_depend_on_the_machine_are_told() -> None:
    help_text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300"}).output
    told = {name: line for line in help_text.splitlines() for name in line.split() if name.startswith("--")}
    assert f"at most {cpu_build._MAX_DEFAULT_KV_BYTES >> 30} GiB" in told["--kv-memory"]
    assert f"at most {cpu_build._MAX_DEFAULT_ADAPTER_BYTES >> 30} GiB" in told["--host-adapter-memory"]
    assert f"{host_memory._MAX_DEFAULT_BYTES >> 30} GiB with a GPU" in told["--host-adapter-memory"]
    assert "$LORAPLEX_STATE, or ~/.local/state/loraplex" in told["--state-dir"]


@pytest.mark.parametrize("command", [("serve",), ("bench", "serve"), ("adapter", "list")])
def test_every_command_takes_the_api_key_from_one_variable(command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert "LORAPLEX_API_KEY" in done.output
    assert "OPENAI_API_KEY" not in done.output


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("2g", 2 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("1000", 1000),
        ("4 kb", 4000),
        ("1t", 2**40),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3_400_000, "3.2 MiB"),
        (120 * 2**20, "120 MiB"),
        (3 * 2**50, "3072 TiB"),
    ],
)
def test_sizes_are_shown_as_people_read_them(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@pytest.mark.parametrize("text", ["", "x", "-1g", "5x", "0", "1e9", "1.2.3m", "nan", "inf"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(BadParameter):
        parse_size(text)


def test_a_context_cut_to_a_sliding_window_is_said_at_the_start(tmp_path: Path) -> None:
    tiny.save_model(tmp_path, "mistral", vocab_size=400, sliding_window=128)
    config = load_config(tmp_path)
    [note] = context_notes(128, EngineOptions(model="x"), config)
    assert "sliding window is not implemented: contexts end with it, at 128 tokens" in note
    assert "not at the model's 512" in note
    decided = EngineOptions(model="x", max_model_len=100)  # by the operator
    assert list(context_notes(100, decided, config)) == []
