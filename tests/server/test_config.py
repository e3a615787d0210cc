"""Options from a file and the environment, and `loraplex config show`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.cli import config_file, fleet_live, serve
from loraplex.cli.main import app
from loraplex.server.options import ServeOptions

WIDE = {"COLUMNS": "400"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options of servers that commands would have started."""
    found: list[ServeOptions] = []
    for module in (serve, fleet_live):
        monkeypatch.setattr(module, "run_server", lambda options, *_: found.append(options))
    return found


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> str:
        path = tmp_path / "loraplex.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def run(*args: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, args, env=WIDE | (env or {}))


def shown(*args: str, env: dict[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    """Return each option as `config show` has it: its value, and where that is from."""
    result = run("config", "show", *args, "--json", env=env)
    assert result.exit_code == 0, result.output
    return {row["option"]: (row["value"], row["from"]) for row in json.loads(result.stdout)}


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(
    write: Any, started: list[ServeOptions]
) -> None:
    config = write("""
        [serve]
        model = "from-file"
        host = "file.example.com"
        port = 1
        max-waiting = 2
        shutdown-grace = 3
        load-popular = true
        allowed-hosts = ["a.example.com", "b.example.com"]
        batching = "grouped"
    """)
    env = {"LORAPLEX_SERVE_PORT": "4", "LORAPLEX_SERVE_HOST": "env.example.com", "LORAPLEX_CONFIG": config}
    result = run("serve", "--host", "flag.example.com", env=env)
    assert result.exit_code == 0, result.output
    [options] = started
    assert options.engine.model == "from-file"
    assert (options.host, options.port, options.waiting.max_requests) == ("flag.example.com", 4, 2)
    assert options.shutdown_grace_s == 3.0
    assert options.engine.loads_popular
    assert options.allowed_hosts == ("a.example.com", "b.example.com")
    assert options.engine.batching == "grouped"
    assert options.engine.device == "auto"

    rows = shown("serve", "--host", "flag.example.com", env=env)
    assert rows["--host"] == ("flag.example.com", "flag")
    assert rows["--port"] == (4, "environment LORAPLEX_SERVE_PORT")
    assert rows["--max-waiting"] == (2, f"file {config}:6")
    assert rows["--device"] == ("auto", "default")
    assert rows["--model"] == ("from-file", f"file {config}:3")
    assert not started[1:], "nothing is started to show options"


def test_a_model_given_as_an_argument_wins_over_the_files_and_the_environments(
    write: Any, started: list[ServeOptions]
) -> None:
    config = write('[serve]\nmodel = "from-file"\n')
    assert run("serve", "given", "--config", config).exit_code == 0
    assert run("serve", "--config", config, "--model", "named").exit_code == 0
    assert run("serve", "--config", config, env={"LORAPLEX_SERVE_MODEL": "of-env"}).exit_code == 0
    assert [options.engine.model for options in started] == ["given", "named", "of-env"]
    both = run("serve", "given", "--model", "named", "--config", config)
    assert both.exit_code == 2
    assert "two models" in both.output
    rows = shown("serve", "given", "--config", config)
    assert rows["MODEL"] == ("given", "flag")
    assert "--model" not in rows


def test_each_command_reads_its_own_section(write: Any, started: list[ServeOptions]) -> None:
    config = write("""
        [serve]
        port = 1
        [fleet.serve]
        model = "m"
        port = 2
        replicas = 3
        "routing" = "most-idle"
    """)
    assert run("fleet", "serve", "--config", config).exit_code == 0
    [options] = started
    assert (options.port, options.num_replicas, options.policy) == (2, 3, "most-idle+everywhere")
    assert shown("fleet", "serve", "--config", config)["--routing"][1] == f"file {config}:8"
    assert shown("demo", "--config", config)["--port"] == (8000, "default")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[serve]\nprot = 1", ":2: loraplex serve has no option 'prot'; did you mean port?"),
        (
            "[serve]\nmax_waiting = 1",
            ":2: loraplex serve has no option 'max_waiting'; did you mean max-waiting?",
        ),
        ("[serve]\nconfig = 'x'", "loraplex serve has no option 'config'"),
        ("[srve]\nport = 1", ":1: there is no section [srve]; did you mean [serve]?"),
        ("[fleet.status]\njson = true", ":1: there is no section [fleet.status]"),
        ("[fleet]\nport = 1", ":1: there is no section [fleet]"),
        ("port = 1", ":1: port is in no section; put it below one of [serve]"),
        ("[serve]\nport = '1'", ":2: port is a whole number, not a string"),
        ("[serve]\n\nport = true", ":3: port is a whole number, not true"),
        ("[serve]\nport = 1.0", ":2: port is a whole number, not 1.0"),
        ("[serve]\nload-popular = 1", ":2: load-popular is true or false, not 1"),
        ("[serve]\nadapter = 'a=b'", ":2: adapter is a list of strings, not a string"),
        ("[serve]\nadapter = ['a=b', 1]", ":2: adapter is a list of strings, not a list"),
        ("[serve.adapter]\na = 'b'", "adapter is a list of strings, not a table"),
        ("[serve]\nhost = 2026-01-01", ":2: host is a string, not a date or time"),
        ("[demo]\nport = 'x'", ":2: port is a whole number"),  # of another command, but wrong all the same
        ("[serve]\nport = 70000", "less than or equal to 65535 (given in "),
        ("[serve]\nkv-memory = 'huge'", "'huge' is not a size"),
        ("[serve]\nkv-memory = 'huge'", "(given in "),
        ("[serve]\nmax-ttft = nan", "nan is no time"),
        ("[serve\nport = 1", "is no TOML"),
        ("x = " + "[" * 5000, "nested too deeply"),
        (f"[serve]\nport = {'9' * 5000}", "is no TOML: Exceeds the limit (4300 digits)"),
        (f"[serve]\nport = 0x{'f' * 5000}", ":2: port is a number of at most 64 bits, not a larger one"),
        (b"[serve]\nhost = '\xff'", "is not UTF-8"),
        (b"#" * ((1 << 20) + 1), "is larger than 1 MiB"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(
    write: Any, started: list[ServeOptions], text: str | bytes, says: str
) -> None:
    result = run("serve", "m", "--config", write(text))
    assert (result.exit_code, started) == (2, [])
    assert says in result.output


def test_a_pipe_that_nobody_writes_to(
    tmp_path: Path, started: list[ServeOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_file, "_WAIT_S", 0.0)
    os.mkfifo(tmp_path / "pipe")
    result = run("serve", "m", "--config", str(tmp_path / "pipe"))
    assert (result.exit_code, started) == (2, [])
    assert "nothing is written to the pipe" in result.output


def test_a_missing_file_is_no_empty_one(tmp_path: Path, started: list[ServeOptions]) -> None:
    for path, says in ((tmp_path / "none.toml", "there is no config file"), (tmp_path, "cannot be read")):
        result = run("serve", "m", "--config", str(path))
        assert (result.exit_code, started) == (2, [])
        assert says in result.output


def test_a_wrong_variable_is_named(started: list[ServeOptions]) -> None:
    """Kubernetes sets such a one for a service called loraplex-serve."""
    result = run("serve", "m", env={"LORAPLEX_SERVE_PORT": "tcp://10.0.0.1:80"})
    assert (result.exit_code, started) == (2, [])
    assert "(given in LORAPLEX_SERVE_PORT)" in result.output


def test_secrets_are_masked_wherever_they_are_from(write: Any) -> None:
    config = write("""
        [fleet.serve]
        api-key = ["hidden-1", "hidden-2"]
        backend = ["http://user:hidden-3@gpu-1:8000", "http://hidden-8@gpu-2:8000", "http://gpu-3/a@b"]
        adapter = ["sql=https://me:hidden-9@host/x?token=hidden-10&hidden-11#sig=hidden-12", "a=s3://b/c#00"]
    """)
    args = ("fleet", "serve", "--config", config, "--backend-key", "hidden-4")
    env = {"LORAPLEX_BACKEND_ADMIN_KEY": "hidden-5", "LORAPLEX_ADMIN_KEY": "hidden-6 hidden-7"}
    rows = shown(*args, env=env)
    assert rows["--api-key"][0] == ["****", "****"]
    assert rows["--backend"][0] == [
        "http://****@gpu-1:8000",
        "http://****@gpu-2:8000",
        "http://gpu-3/a@b",
    ]
    assert rows["--adapter"][0] == ["sql=https://****@host/x?token=****&****#sig=****", "a=s3://b/c#00"]
    assert rows["--backend-key"] == ("****", "flag")
    assert rows["--backend-admin-key"] == ("****", "environment LORAPLEX_BACKEND_ADMIN_KEY")
    assert rows["--admin-key"] == (["****", "****"], "environment LORAPLEX_ADMIN_KEY")
    assert "hidden" not in run("config", "show", *args, env=env).output


def test_a_variable_that_is_no_option_is_pointed_out() -> None:
    env = {"LORAPLEX_SERVE_MAX_WAITIN": "1", "LORAPLEX_SERVE_SERVICE_HOST": "10.0.0.1"}
    said = run("config", "show", env=env).stderr
    assert said == (
        "LORAPLEX_SERVE_MAX_WAITIN is no option of `loraplex serve`; "
        "did you mean LORAPLEX_SERVE_MAX_WAITING?\n"
    )


def test_a_server_points_out_a_key_that_it_does_not_get(started: list[Any]) -> None:
    env = {"LORAPLEX_SERVE_API_KY": "secret", "LORAPLEX_APIKEY": "secret", "LORAPLEX_BACKEND_KEY": "k"}
    said = run("serve", "model", env=env).stderr
    assert "LORAPLEX_APIKEY is no option of `loraplex serve`; did you mean LORAPLEX_API_KEY?\n" in said
    assert (
        "LORAPLEX_SERVE_API_KY is no option of `loraplex serve`; did you mean LORAPLEX_SERVE_API_KEY" in said
    )
    assert "secret" not in said
    assert "BACKEND" not in said


def test_only_commands_that_take_a_file_are_shown() -> None:
    result = run("config", "show", "twin", "run")
    assert "these do: serve, demo, fleet serve" in str(result.exception)
