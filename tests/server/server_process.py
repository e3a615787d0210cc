"""`loraplex serve` as a separate process, calls that tests make to it, and commands called in this
process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.errors import LoraplexError

COMMAND = [sys.executable, "-m", "loraplex.cli.main"]
PATIENCE_S = 120.0


@contextmanager
def serving(
    folder: Path, *options: str, command: str = "serve", environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run a server process; yields it, its URL and its output until it was ready."""
    start = [*COMMAND, *command.split(), str(folder), "--served-model-name", "tiny", "--port", "0"]
    memory = () if "--backend" in options else ("--kv-memory", "4MiB")  # a front has no engine
    process = subprocess.Popen(
        [*start, *memory, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "NUMBA_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if "ready at " in line:
                url = line.split("ready at ")[1].strip().removesuffix("/v1")
                break
        else:
            pytest.fail(f"the server ended: {said}")
        yield process, url, said
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Ended(NamedTuple):
    """The exit code of a command, and its output."""

    returncode: int
    stdout: str
    stderr: str


def run_command(*args: str, **environment: str) -> Ended:
    """Run a command in this process: a new process takes a second for imports that are done here already."""
    done = CliRunner().invoke(app, args, env={"COLUMNS": "200", **environment})
    if done.exception is not None and not isinstance(done.exception, SystemExit | LoraplexError):
        raise done.exception
    said = str(done.exception) if isinstance(done.exception, LoraplexError) else ""
    return Ended(done.exit_code, done.stdout, done.stderr + said)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition: events in another process can only be polled."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for: {what}"
        time.sleep(0.02)


def replicas(url: str) -> list[dict[str, Any]]:
    """Return what a fleet reports about its replicas."""
    rows: list[dict[str, Any]] = httpx.get(f"{url}/v1/fleet").json()["data"]
    return rows


def metric(url: str, name: str) -> float:
    """Return the value of a metric that has one series."""
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
    assert found is not None, f"no metric {name}"
    return float(found.group(1))


def everything_is_free(url: str) -> bool:
    """Return whether no request runs or waits, and none holds blocks or pins an adapter."""
    adapters = httpx.get(f"{url}/v1/adapters").json()["data"]
    return (
        all(adapter["in_flight"] == 0 for adapter in adapters)
        and metric(url, "vllm:num_requests_running") == 0
        and metric(url, "vllm:num_requests_waiting") == 0
        and metric(url, "vllm:kv_cache_usage_perc") == 0
    )


def complete(url: str, model: str, key: str = "none", **fields: Any) -> str:
    """Return the greedy answer to a fixed prompt."""
    body = {"model": model, "prompt": "the dog", "temperature": 0, "ignore_eos": True, "max_tokens": 12}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/completions", json=body | fields, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])
