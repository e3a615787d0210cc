"""The walk-through of docs/operations.md, run as it is written: a new user's first tenants."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from serving_fakes import hf_tokenizer

from loraplex.core.paths import cache_dir
from loraplex.demo.base import BASE_FOLDER_NAME

ROOT = Path(__file__).parents[3]

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


@pytest.mark.skipif(shutil.which("curl") is None, reason="the walk-through calls curl")
def test_the_tenants_of_the_docs_behave_as_the_docs_say(tmp_path: Path) -> None:
    clone, home = clone_with_a_tiny_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    commands = walk_through()
    assert commands.count("8010") > 3
    environment = {
        **os.environ,
        "HOME": str(home),
        "LORAPLEX_CACHE": str(cache_dir()),  # of compiled kernels
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    done = subprocess.run(
        ["bash", "-ec", commands.replace("8010", str(port))],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
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
