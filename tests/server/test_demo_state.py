"""The demo remembers its adapters, and does not touch the state of other servers."""

from __future__ import annotations

import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest
from serving_fakes import make_spec
from typer.testing import CliRunner

from loraplex.adapters.registry import AdapterRegistry
from loraplex.cli.main import app
from loraplex.server.listening import AddressError
from loraplex.server.options import ServeOptions
from loraplex.server.state_dir import default_state_dir


def test_a_demo_remembers_what_was_loaded_into_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_STATE", str(tmp_path / "state"))
    remembered: list[list[str]] = []

    def serve(options: ServeOptions, announcer: object) -> None:
        """Stands in for a server into which an adapter is loaded."""
        with closing(AdapterRegistry(options.state_dir or default_state_dir(), "base")) as registry:
            remembered.append(registry.names())
            registry.put("by-hand", make_spec("v1"))

    monkeypatch.setattr("loraplex.server.run.serve", serve)
    monkeypatch.setattr("loraplex.demo.base.ensure_demo_base", lambda: tmp_path / "model")
    with closing(AdapterRegistry(default_state_dir(), "base")) as registry:
        registry.put("of-a-server", make_spec("v2"))
        for _ in range(2):
            assert CliRunner().invoke(app, ["demo"]).exit_code == 0
        assert registry.names() == ["of-a-server"]
    assert remembered == [[], ["by-hand"]]


@pytest.mark.parametrize("program", [".venv/bin/loraplex", "/somewhere/main.py"])
def test_a_port_that_is_taken_is_told_with_the_command_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("loraplex.demo.base.ensure_demo_base", lambda: tmp_path / "model")
    monkeypatch.setattr(sys, "argv", [program, "demo"])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = CliRunner().invoke(app, ["demo", "--port", str(port)]).exception
    assert isinstance(error, AddressError)
    command = program if program.endswith("loraplex") else "loraplex"
    assert str(error) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; run `{command} demo --port 0` for any "
        "free port, or name one"
    )
