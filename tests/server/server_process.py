"""`loraplex serve` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "loraplex.cli.main"]


@contextmanager
def serving(
    folder: Path, *options: str, command: str = "serve", environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server process; yields it, its URL and all it said until it was ready."""
    start = [*COMMAND, *command.split(), "--model", str(folder), "--served-model-name", "tiny", "--port", "0"]
    process = subprocess.Popen(
        [*start, "--kv-memory", "4MiB", *options],
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
