"""`loraplex fleet scale` and `restart`: the note printed while a server works on it, never before a
refusal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from loraplex.cli import fleet_live
from loraplex.cli.main import app

REFUSED = (400, b'{"error": {"message": "there is no replica 7"}}')
DONE = (200, b'{"data": []}')


@contextmanager
def server_that(answers: Callable[[], tuple[int, bytes]]) -> Iterator[str]:
    """Run a server with this answer to every change; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answers()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("change", [("restart", "7"), ("scale", "3")])
def test_nothing_is_said_before_a_refusal(change: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_live, "_REFUSED_WITHIN_S", 3600.0)  # however slow this machine is
    with server_that(lambda: REFUSED) as url:
        result = CliRunner().invoke(app, ["fleet", *change, "--base-url", url])
    assert str(result.exception) == "there is no replica 7"
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("restart", "1", "--move"), "waiting for the server to restart replica 1"),
        (("scale", "1"), "waiting for the server to scale to 1 replica"),
        (("scale", "3", "--move"), "waiting for the server to scale to 3 replicas"),
    ],
)
def test_a_change_that_is_under_way_may_take_a_while(
    change: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    is_said = threading.Event()

    def say(message: str) -> None:
        said.append(message)
        is_said.set()

    def answer_when_it_is_said() -> tuple[int, bytes]:
        assert is_said.wait(60)
        return DONE

    monkeypatch.setattr(fleet_live, "_REFUSED_WITHIN_S", 0.0)
    monkeypatch.setattr(fleet_live, "_say", say)
    with server_that(answer_when_it_is_said) as url:
        result = CliRunner().invoke(app, ["fleet", *change, "--base-url", url])
    assert result.exit_code == 0, result.output
    assert said == [f"{words}; this may take a while"]
