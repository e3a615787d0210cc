"""The walk-through of docs/operations.md, run as it is written: a new user's first tenants."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any, Final

import pytest
import tiny
from serving_fakes import hf_tokenizer

from loraplex.core.paths import cache_dir
from loraplex.demo.base import BASE_FOLDER_NAME

ROOT = Path(__file__).parents[3]
_TIMEOUT_S: Final = 600

pytestmark = pytest.mark.slow


def walk_through() -> str:
    """Return the commands of the section on tenants."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    found = re.search(r"^## Tenants$.*?^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def clone_with_a_tiny_model(folder: Path) -> tuple[Path, Path]:
    """Return a folder laid out as a clone after `make demo`, and its user's home, with a tiny model and tiny
    adapters in place of the demo's."""
    clone, home = folder / "clone", folder / "home"
    model = home / ".cache" / "loraplex" / BASE_FOLDER_NAME
    model.mkdir(parents=True)
    base = tiny.save_model(model, vocab_size=448)
    hf_tokenizer().save_pretrained(model)
    for seed, path in enumerate(sorted((ROOT / "loraplex" / "demo" / "adapters").iterdir())):
        if path.is_dir():
            adapter = clone / "loraplex" / "demo" / "adapters" / path.name
            tiny.save_adapter(adapter, base, rank=4, seed=seed)
    command = clone / ".venv" / "bin" / "loraplex"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m loraplex.cli.main "$@"\n')
    command.chmod(0o755)
    return clone, home


@contextmanager
def kept_port() -> Iterator[int]:
    """Yield a port that a server may listen at, and that nobody is given who asks for any."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def run_to_the_end(commands: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run commands of a shell, and end what they have started, however they end."""
    shell = ["bash", "-ec", commands]
    with subprocess.Popen(
        shell, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True, **options
    ) as process:
        try:
            said, complained = process.communicate(timeout=_TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(shell, process.returncode, said, complained)


def test_commands_that_fail_leave_nothing_running() -> None:
    open_until_all_end, inherited = os.pipe()
    done = run_to_the_end("sleep 1000 > /dev/null 2>&1 & false", pass_fds=(inherited,))
    os.close(inherited)
    assert done.returncode == 1
    assert os.read(open_until_all_end, 1) == b"", "the last process that had the other end is gone"
    os.close(open_until_all_end)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the walk-through calls curl")
def test_nobody_waits_for_a_server_that_has_ended() -> None:
    (loop,) = re.findall("^until .*$", walk_through(), re.MULTILINE)
    with kept_port() as port:
        started = f"false & SERVER=$!\nwait $SERVER || true\n{loop.replace('8010', str(port))}"
        assert run_to_the_end(started).returncode == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="the walk-through calls curl")
def test_the_tenants_of_the_docs_behave_as_the_docs_say(tmp_path: Path) -> None:
    clone, home = clone_with_a_tiny_model(tmp_path)
    commands = walk_through()
    assert commands.count("8010") > 3
    environment = {
        **os.environ,
        "HOME": str(home),
        "LORAPLEX_CACHE": str(cache_dir()),  # of compiled kernels
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    with kept_port() as port:
        done = run_to_the_end(commands.replace("8010", str(port)), cwd=clone, env=environment)
    assert done.returncode == 0, done.stderr
    statuses = [int(status) for status in re.findall(r"^HTTP/1\.1 (\d+)", done.stdout, re.MULTILINE)]
    assert statuses == [200, 404, 200, 200, 429]
    assert re.findall(r"^x-ratelimit-remaining-requests: (\d+)", done.stdout, re.MULTILINE)[0] == "2"
    assert re.search(r"^retry-after: \d+", done.stdout, re.MULTILINE)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"object":"list"')]
    models = [sorted(each["id"] for each in answer["data"] if "id" in each) for answer in answers]
    assert models[0] == models[-1] == sorted([BASE_FOLDER_NAME, "formal-email", "pirate"])
    (tenants,) = (answer["data"] for answer in answers if "trouble" in answer)
    assert {each["name"]: each["requests"] for each in tenants} == {"acme": 3, "ops": 0}
