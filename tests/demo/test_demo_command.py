"""`loraplex demo` as a user runs it. Needs the real base model, which is fetched if it is not in the cache:
the adapters that ship fit no smaller one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from demo.styles import STYLE_CHECKS

from loraplex.demo import demo_adapters
from loraplex.demo.base import BASE_FOLDER_NAME, ensure_demo_base

PATIENCE_S = 120.0
EXAMPLES = [BASE_FOLDER_NAME, "pirate", "haiku"]


@contextmanager
def demonstrating(state_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a session of its own, as in a terminal; yields it and all it said until it was ready."""
    cache = ensure_demo_base().parent
    environment = {
        **os.environ,
        "LORAPLEX_CACHE": str(cache),
        "LORAPLEX_STATE": str(state_dir),
        "PIP_NO_INDEX": "1",  # with a base in the cache there is nothing to fetch
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "loraplex.cli.main", "demo", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if "Try it:" in said and not line.strip():
                break
        else:
            pytest.fail(f"the demo ended: {said}")
        yield process, said
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def send(curl: str) -> dict[str, Any]:
    """Send a line of the banner as `curl` would."""
    program, url, option, data = shlex.split(curl)
    assert (program, option) == ("curl", "-d")
    headers = {"content-type": "application/x-www-form-urlencoded"}  # curl's, whatever the data is
    response = httpx.post(url, content=data, headers=headers, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.slow
def test_the_demo_shows_lines_that_answer_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    with demonstrating(tmp_path) as (process, said):
        lines = [line for line in said.splitlines() if line.strip().startswith("curl ")]
        bodies = [json.loads(shlex.split(line)[-1]) for line in lines]
        assert [body["model"] for body in bodies] == EXAMPLES
        url = said.split("ready at ")[1].split()[0]
        assert [shlex.split(line)[1] for line in lines] == [f"{url}/chat/completions"] * 3
        with ThreadPoolExecutor() as threads:
            answers = list(threads.map(send, lines))
        assert [answer["model"] for answer in answers] == EXAMPLES
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert all(text.strip() for text in texts)
        for name, text in zip(EXAMPLES[1:], texts[1:], strict=True):
            assert STYLE_CHECKS[name](text), text

        names = [model["id"] for model in httpx.get(f"{url}/models").json()["data"]]
        assert sorted(names) == sorted([BASE_FOLDER_NAME, *(adapter.name for adapter in demo_adapters())])

        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches every process of the terminal
        rest, _ = process.communicate(timeout=PATIENCE_S)  # to the end: no process holds the pipe any more
        assert process.returncode == 0
        assert "Traceback" not in said + rest
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/models")
    assert [path.name for path in tmp_path.iterdir()] == ["demo"], "the state of other servers is not touched"
