"""`loraplex fleet serve --backend`: real servers behind a real front, a tiny model, the openai client."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny
from server_process import COMMAND, serving
from serving_fakes import hf_tokenizer

MODELS = ("tiny", "one", "two")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("backends")
    base = tiny.save_model(root, vocab_size=400, max_position_embeddings=1024)
    hf_tokenizer().save_pretrained(root)
    for seed, name in enumerate(("one", "two")):
        tiny.save_adapter(root / "adapters" / name, base, rank=4 * (seed + 1), seed=seed + 1)
    return root


@pytest.fixture(scope="module")
def servers(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    """Two servers that know no adapter and may load them."""
    with ExitStack() as stack:
        found = []
        for _ in range(2):
            state = tmp_path_factory.mktemp("state")
            options = ("--allow-adapter-dir", str(folder / "adapters"), "--state-dir", str(state))
            process, url, _ = stack.enter_context(serving(folder, *options))
            found.append((process, url))
        yield found


@pytest.fixture(scope="module")
def front(
    folder: Path,
    servers: list[tuple[subprocess.Popen[str], str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    state = tmp_path_factory.mktemp("front")
    backends = [option for _, url in servers for option in ("--backend", url)]
    options = ("--adapters", str(folder / "adapters"), "--state-dir", str(state), *backends)
    with serving(folder, *options, command="fleet serve") as (_, url, _):
        yield url


def answer(url: str, model: str, **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return client.completions.create(model=model, prompt="w5 w6 w7", max_tokens=12, **options)


def replicas(url: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = httpx.get(f"{url}/v1/fleet").json()["data"]
    return rows


def test_servers_behind_a_front_answer_as_they_do_alone(
    front: str, servers: list[tuple[subprocess.Popen[str], str]], folder: Path
) -> None:
    for name in ("one", "two"):
        body = {"lora_name": name, "lora_path": str(folder / "adapters" / name)}
        assert httpx.post(f"{servers[0][1]}/v1/load_lora_adapter", json=body).status_code == 200
    for model in MODELS:
        for options in ({"temperature": 0, "logprobs": 2}, {"temperature": 1.0, "seed": 7, "n": 2}):
            found, expected = answer(front, model, **options), answer(servers[0][1], model, **options)
            assert [choice.text for choice in found.choices] == [choice.text for choice in expected.choices]
            assert found.usage == expected.usage
    assert all(row["sent"] for row in replicas(front)), "one server did all of it"


def test_bad_backends_are_refused_in_words(
    folder: Path, servers: list[tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")

    def refused(*options: str) -> str:
        found = subprocess.run(
            [*COMMAND, "fleet", "serve", "--model", str(other), "--port", "0", *options],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "COLUMNS": "200", "LORAPLEX_STATE": str(tmp_path / "state")},
        )
        assert found.returncode in (1, 2)
        return found.stderr

    assert "is no address of a server" in refused("--backend", "somewhere")
    assert "nothing answers at http://127.0.0.1:9" in refused("--backend", "http://127.0.0.1:9")
    assert "serves the base model 'tiny'" in refused("--backend", servers[0][1])
    twice = refused("--backend", servers[0][1], "--backend", f"{servers[0][1]}/")
    assert "is given twice with --backend" in twice
    assert "give one of both" in refused("--backend", servers[0][1], "--replicas", "2")


def test_a_server_that_is_gone_is_missed_by_nobody(
    front: str, servers: list[tuple[subprocess.Popen[str], str]]
) -> None:
    """The last test: it ends one of the servers."""
    expected = answer(front, "one", temperature=0).choices[0].text
    servers[1][0].kill()
    for _ in range(8):
        assert answer(front, "one", temperature=0).choices[0].text == expected
    states = [row["state"] for row in replicas(front)]
    assert states == ["ready", "restarting"]
