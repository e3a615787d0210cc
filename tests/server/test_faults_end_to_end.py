"""The whole system under faults: real server and engine processes, real HTTP, a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny
from server_process import PATIENCE_S, complete, everything_is_free, metric, serving, wait_until
from serving_fakes import hf_tokenizer

from loraplex.core.exits import EXIT_ENGINE_FAILED

CONTEXT = 8192
LONG = {"max_tokens": 8000, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    base = tiny.save_model(root, vocab_size=400, max_position_embeddings=CONTEXT)
    hf_tokenizer().save_pretrained(root)
    (root / "more").mkdir()
    for seed, name in enumerate(("one", "two", "three")):
        tiny.save_adapter(root / "adapters" / name, base, rank=4 * (seed + 1), seed=seed + 1)
    return root


@contextlib.contextmanager
def started(folder: Path, state_dir: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    options = [*more, "--adapters", str(folder / "adapters"), "--state-dir", str(state_dir)]
    options += ["--allow-adapter-dir", str(folder / "more"), "--kv-memory", "64MiB"]
    with serving(folder, *options) as (process, url, _):
        yield process, url


@pytest.fixture(scope="module")
def server(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One server for all tests that leave it as they found it."""
    with started(folder, tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture
def own_server(folder: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server for a test that ends it."""
    with started(folder, tmp_path) as found:
        yield found


def engine_pid(server_pid: int) -> int:
    children = [
        int(pid)
        for task in Path(f"/proc/{server_pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    [engine] = [
        pid
        for pid in children
        if b"loraplex.server.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return engine


def test_the_openai_client_streams_what_it_gets_whole(server) -> None:
    _, url = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for model in ("tiny", "one", "tiny:two"):
            request: dict[str, Any] = {"model": model, "seed": 3, "max_tokens": 20}
            messages = [{"role": "user", "content": "hello"}]
            whole = client.chat.completions.create(messages=messages, **request)
            stream = client.chat.completions.create(
                messages=messages, stream=True, stream_options={"include_usage": True}, **request
            )
            chunks = list(stream)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == whole.choices[0].message.content
            assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_client_that_hangs_up_frees_blocks_and_pins(server) -> None:
    _, url = server
    for model in ("one", "tiny"):
        request = {"model": model, "prompt": "the dog", **LONG}
        with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            wait_until(lambda: metric(url, "vllm:num_requests_running") == 1, "the request runs")
            assert metric(url, "vllm:kv_cache_usage_perc") > 0
        wait_until(lambda: everything_is_free(url), "blocks and pins are free")


@pytest.mark.slow
def test_a_stream_goes_on_after_the_engine_was_killed(server) -> None:
    process, url = server
    sampling = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5}
    request = {"model": "two", "prompt": "the dog", **LONG, "max_tokens": 600, "n": 2, **sampling}
    usage = {"stream_options": {"include_usage": True}}
    expected = httpx.post(
        f"{url}/v1/completions", json=request | {"stream": False}, timeout=PATIENCE_S
    ).json()
    before = metric(url, "loraplex:engine_restarts_total")
    texts = {0: "", 1: ""}
    last: dict[str, Any] = {}
    with httpx.stream("POST", f"{url}/v1/completions", json=request | usage, timeout=PATIENCE_S) as response:
        for number, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
            last = json.loads(line.removeprefix("data: "))
            assert "error" not in last, last
            for choice in last["choices"]:
                texts[choice["index"]] += choice["text"]
            if number == 1:
                os.kill(engine_pid(process.pid), signal.SIGKILL)
    assert texts == {choice["index"]: choice["text"] for choice in expected["choices"]}
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == expected["usage"][name]
    assert metric(url, "loraplex:engine_restarts_total") == before + 1
    wait_until(lambda: everything_is_free(url), "blocks and pins are free")


@pytest.mark.slow
def test_a_server_whose_engine_keeps_dying_ends_with_an_exit_code_for_supervisors(own_server) -> None:
    process, url = own_server
    request = {"model": "two", "prompt": "the dog", **LONG}

    def ended() -> bool:
        # There is none, or it was gone before the signal: between two starts, and after the last.
        with contextlib.suppress(ValueError, OSError):
            os.kill(engine_pid(process.pid), signal.SIGKILL)
        return process.poll() is not None

    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        wait_until(ended, "the server ends")
        last = [line for line in lines if line.startswith("data: ")][-1]
    assert "engine" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert process.returncode == EXIT_ENGINE_FAILED == 3
    said = process.stdout.read()
    assert "died too often and is not started again" in said
    assert said.splitlines()[-1].startswith("error: the engine process died too often")
    assert "Traceback" not in said


@pytest.mark.slow
def test_adapters_survive_a_killed_server_and_without_its_engine_the_next_one_ends_in_peace(
    folder: Path, tmp_path: Path
) -> None:
    options = ["--allow-adapter-dir", str(folder / "adapters"), "--state-dir", str(tmp_path)]
    with serving(folder, *options) as (process, url, _):
        for name in ("one", "three"):
            body = {"lora_name": name, "lora_path": str(folder / "adapters" / name)}
            assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=PATIENCE_S).status_code == 200
        before = {name: complete(url, name) for name in ("one", "three")}
        process.kill()
        process.wait()
    with serving(folder, *options) as (process, url, said):
        assert "another server" not in said
        assert {name: complete(url, name) for name in ("one", "three")} == before
        os.kill(engine_pid(process.pid), signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_reload_serves_old_requests_with_the_old_version(server, folder: Path, tmp_path: Path) -> None:
    _, url = server
    live = folder / "more" / "live"
    shutil.copytree(folder / "adapters" / "one", live)

    def load(**fields: Any) -> None:
        body = {"lora_name": "live", "lora_path": str(live), **fields}
        loaded = httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=PATIENCE_S)
        assert loaded.status_code == 200, loaded.text

    load()
    old = complete(url, "live", max_tokens=600)
    request = {"model": "live", "prompt": "the dog", **LONG, "max_tokens": 600}
    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        streamed = text_of(next(lines))
        shutil.copytree(folder / "adapters" / "two", tmp_path / "new")
        for file in (tmp_path / "new").iterdir():
            os.replace(file, live / file.name)
        load(load_inplace=True)
        new = complete(url, "live")
        streamed += "".join(text_of(line) for line in lines)
    assert streamed == old
    assert new == complete(url, "live")
    assert not old.startswith(new)
    wait_until(lambda: everything_is_free(url), "the old version is gone")


def test_a_server_that_is_told_to_end_cancels_what_it_does_not_finish(folder: Path, tmp_path: Path) -> None:
    request = {"model": "tiny", "prompt": "the dog", **LONG}
    with (
        started(folder, tmp_path, "--shutdown-grace", "0") as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=PATIENCE_S) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        *_, last = (line for line in lines if line)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert process.stdout is not None
        said = process.stdout.read().splitlines()
        assert "shutting down: waiting up to 0 s for 1 request in flight" in said
        assert said[-1] == "shut down"
        [logged] = [line for line in said if "route=/v1/completions" in line]
        assert " INFO request: cancelled status=200 " in logged
        assert not [line for line in said if " WARNING " in line]
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_server_that_is_told_to_end_waits_for_no_upload(folder: Path, tmp_path: Path) -> None:
    lines = (
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-length: 100",
        "expect: 100-continue",
    )
    with (
        started(folder, tmp_path, "--shutdown-grace", "0") as (process, url),
        socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=PATIENCE_S) as client,
    ):
        client.sendall("\r\n".join((*lines, "", "")).encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 100 "), "it waits for the upload"
        process.send_signal(signal.SIGTERM)
        answer = b""
        while part := client.recv(4096):
            answer += part
        assert b"HTTP/1.1 503 " in answer
        assert b'"code":"shutting_down"' in answer
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()
        assert process.wait(PATIENCE_S) == 0


def test_unloading_an_adapter_in_use_drains_it(server, folder: Path) -> None:
    _, url = server
    expected = complete(url, "three", max_tokens=600)
    request = {"model": "three", "prompt": "the dog", **LONG, "max_tokens": 600}
    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        streamed = text_of(next(lines))
        answer = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "three"}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        streamed += "".join(text_of(line) for line in lines)
    assert streamed == expected
    body = {"model": "three", "prompt": "x"}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 404
    assert "three" not in {a["name"] for a in httpx.get(f"{url}/v1/adapters").json()["data"]}
    body = {"lora_name": "three", "lora_path": str(folder / "adapters" / "three")}
    assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=PATIENCE_S).status_code == 200


def text_of(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return str(choices[0]["text"]) if choices else ""
