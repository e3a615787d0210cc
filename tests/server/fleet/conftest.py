"""Servers that run while the tests of this folder do: a start takes seconds."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import tiny
from server_process import serving
from serving_fakes import hf_tokenizer


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and two adapters."""
    root = tmp_path_factory.mktemp("fleet")
    base = tiny.save_model(root, vocab_size=400, max_position_embeddings=1024)
    hf_tokenizer().save_pretrained(root)
    for seed, name in enumerate(("one", "two")):
        tiny.save_adapter(root / "adapters" / name, base, rank=4 * (seed + 1), seed=seed + 1)
    return root


@pytest.fixture(scope="package")
def backends(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    """Three servers that may load adapters; the first has both under their names."""
    with ExitStack() as stack, ThreadPoolExecutor() as threads:

        def start(state: Path) -> tuple[subprocess.Popen[str], str]:
            options = ("--allow-adapter-dir", str(folder / "adapters"), "--state-dir", str(state))
            process, url, _ = stack.enter_context(serving(folder, *options))
            return process, url

        found = list(threads.map(start, [tmp_path_factory.mktemp("backend") for _ in range(3)]))
        for name in ("one", "two"):
            body = {"lora_name": name, "lora_path": str(folder / "adapters" / name)}
            assert httpx.post(f"{found[0][1]}/v1/load_lora_adapter", json=body).status_code == 200
        yield found


@pytest.fixture(scope="package")
def single(backends: list[tuple[subprocess.Popen[str], str]]) -> str:
    """The address of a server that serves both adapters alone."""
    return backends[0][1]


@pytest.fixture(scope="package")
def front(
    folder: Path,
    backends: list[tuple[subprocess.Popen[str], str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """A front of `backends`."""
    addresses = [option for _, url in backends for option in ("--backend", url)]
    state = tmp_path_factory.mktemp("front")
    options = ("--adapters", str(folder / "adapters"), "--state-dir", str(state), *addresses)
    with serving(folder, *options, command="fleet serve") as (_, url, _):
        yield url
