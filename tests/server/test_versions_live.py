"""Versions on real servers: processes, tiny models, the real openai client and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from server_process import serving, wait_until
from serving_fakes import hf_tokenizer
from typer.testing import CliRunner

from loraplex.adapters.rollout import takes_canary
from loraplex.adapters.spec import WEIGHTS_FILE
from loraplex.cli.main import app
from loraplex.core.errors import UserError

VERSIONS = ("v0", "v1", "v2")
SHARE = 0.4
PROMPT = "w5 w6 w7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("versions")
    base = tiny.save_model(root, vocab_size=400)
    hf_tokenizer().save_pretrained(root)
    for seed, name in enumerate((*VERSIONS, "overflows")):
        tiny.save_adapter(root / "adapters" / name, base, rank=4, seed=seed + 1)
    weights = root / "adapters" / "overflows" / WEIGHTS_FILE
    save_file({name: 1e30 * values for name, values in load_file(weights).items()}, weights)
    return root


class Server:
    """A server as its users see it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def do(self, *arguments: str) -> str:
        """Run `loraplex adapter`; return what it prints."""
        ended = CliRunner().invoke(app, ["adapter", *arguments, "--base-url", self.url])
        assert ended.exit_code == 0, ended.exception
        return ended.output

    def refuses(self, *arguments: str) -> str:
        """Run a command that is refused; return the end of its message."""
        ended = CliRunner().invoke(app, ["adapter", *arguments, "--base-url", self.url])
        assert isinstance(ended.exception, UserError), ended.output
        return str(ended.exception)

    def ask(self, model: str, request_id: str, **options: Any) -> tuple[str, str]:
        """Return the text of an answer, and the version that the usage names."""
        answer = self._client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=8,
            temperature=0,
            extra_headers={"X-Request-Id": request_id},
            extra_body={"ignore_eos": True},
            **options,
        )
        assert len({choice.text for choice in answer.choices}) == 1
        assert answer.usage is not None
        return answer.choices[0].text, answer.usage.adapter_version  # type: ignore[attr-defined]

    def stream(self, model: str, request_id: str) -> tuple[str, str]:
        text, version = "", ""
        with self._client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Request-Id": request_id},
            extra_body={"ignore_eos": True},
        ) as stream:
            for chunk in stream:
                text += "".join(choice.text for choice in chunk.choices)
                if chunk.usage is not None:
                    version = chunk.usage.adapter_version  # type: ignore[attr-defined]
        return text, version

    def roles(self) -> list[tuple[str, str, float | None]]:
        rows = json.loads(self.do("versions", "bot", "--json"))
        return [(row["role"], Path(row["path"]).name, row["share"]) for row in rows]


@contextmanager
def started(folder: Path, state: Path, command: str) -> Iterator[tuple[subprocess.Popen[str], Server]]:
    options = ["--allow-adapter-dir", str(folder / "adapters"), "--state-dir", str(state)]
    if command == "fleet serve":
        options += ["--replicas", "2", "--routing", "round-robin"]  # by which every replica has every adapter
    with serving(folder, *options, command=command) as (process, url, _):
        yield process, Server(url)


@pytest.mark.slow
def test_the_life_of_a_name(folder: Path, tmp_path: Path) -> None:
    with started(folder, tmp_path, "serve") as (process, server):
        texts: dict[str, str] = {}  # by version
        for name in VERSIONS:
            server.do("load", name, name)
            text, version = server.ask(name, "r")
            texts[version] = text
        v0, v1, _ = texts
        assert len(set(texts.values())) == 3
        server.do("load", "bot", "v0")
        assert "share of 0.4" in server.do("load", "bot", "v1", "--canary-share", str(SHARE))

        def check_share() -> None:
            seen = set()
            for number in range(24):
                request_id = f"request-{number}"
                promised = v1 if takes_canary("bot", v1, SHARE, request_id) else v0
                asked = server.stream if number % 2 else server.ask
                assert asked("bot", request_id) == (texts[promised], promised)
                seen.add(promised)
            assert seen == {v0, v1}
            assert server.ask("bot", "request-0", n=3)[1] in (v0, v1)

        check_share()
        process.send_signal(signal.SIGKILL)
        process.wait()

    with started(folder, tmp_path, "serve") as (_, server):
        assert server.roles() == [("stable", "v0", 0.6), ("canary", "v1", 0.4)]
        check_share()
        failed = server.refuses("load", "bot", "v2", "--replace")
        assert "promote or abort it" in failed

        # A request sent while the name is switched is answered by the version that its answer names.
        wrong: list[tuple[str, str]] = []
        is_over = threading.Event()

        def ask_on() -> None:
            number = 0
            while not is_over.is_set():
                text, version = server.ask("bot", f"other-{number}")
                number += 1
                if texts.get(version) != text:
                    wrong.append((text, version))

        asking = threading.Thread(target=ask_on)
        asking.start()
        try:
            server.do("promote", "bot")
            server.do("load", "bot", "v2", "--replace")
            assert server.roles() == [
                ("stable", "v2", 1.0),
                ("previous", "v1", None),
                ("previous", "v0", None),
            ]
            failed = server.refuses("load", "bot", "overflows", "--replace")
            assert "could not be staged" in failed
            assert "weights overflow" in failed
            server.do("rollback", "bot")
            server.do("rollback", "bot", "--version", v0[:12])
        finally:
            is_over.set()
            asking.join()
        assert wrong == []
        assert server.ask("bot", "r") == (texts[v0], v0)
        assert "no previous version" in server.refuses("rollback", "bot")
        server.do("load", "bot", "v1", "--canary-share", "0.9")
        server.do("abort", "bot")
        assert server.roles() == [("stable", "v0", 1.0)]
        assert "unknown" not in server.do("versions")
        server.do("unload", "bot")
        assert "is not loaded" in server.refuses("promote", "bot")
        assert "there is no adapter 'bot'; there are" in server.refuses("versions", "bot")


@pytest.mark.slow
def test_a_fleet_stages_a_version_on_every_replica_before_anybody_asks_for_it(
    folder: Path, tmp_path: Path
) -> None:
    with started(folder, tmp_path, "fleet serve") as (_, server):

        def loads() -> int:
            [adapter] = httpx.get(f"{server.url}/v1/adapters").json()["data"]
            return int(adapter["loads"])

        server.do("load", "bot", "v0")
        server.do("load", "bot", "v1", "--replace")
        wait_until(lambda: loads() == 2, "both replicas to say that they hold it")
        # A replica that is away does not block the others, and knows the new version when it is back.
        [first, second] = httpx.get(f"{server.url}/v1/fleet").json()["data"]
        os.kill(first["pid"], signal.SIGKILL)
        server.do("load", "bot", "v2", "--replace")
        texts = {server.ask("bot", f"r{number}") for number in range(6)}
        assert len(texts) == 1
        httpx.post(f"{server.url}/v1/fleet/drain", json={"replica": second["replica"]}).raise_for_status()
        wait_until(
            lambda: httpx.get(f"{server.url}/v1/fleet").json()["data"][0]["state"] == "ready",
            "the killed replica to be back",
        )
        assert {server.ask("bot", "last")} == texts
